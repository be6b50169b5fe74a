"""TreePO's sampling (arXiv 2508.17445): segments of fixed length; after each one, every unfinished path divides until there are ``leaves``.

A segment is ``segment`` sampled tokens of a trajectory, over the ends of turns; observations do not count. When all paths have ended before
there are enough leaves, further ones fork from random segment ends of random paths. All leaves form one group.
"""

from scheduler.context import Context
from scheduler.forks import cut, emit, grown, widened
from scheduler.tree import Tree
from wire.declared import StrategyGives
from wire.numbers import Count


def gives(leaves: int, **_: object) -> StrategyGives:
    """Declare ``leaves`` whole trajectories per task."""
    return StrategyGives(group="task", size=leaves)


async def grow(
    tree: Tree, ctx: Context, leaves: Count = 16, segment: Count = 512, depth: Count = 14, divergence: Count = 2
) -> None:
    """Grow the tree to its leaves, then emit them as one group. depth: after how many segments no path divides any more."""
    paths = await grown(tree, ctx, dict.fromkeys(range(min(leaves, divergence))))
    for level in range(1, depth):
        if len(paths) >= leaves or not await widened(tree, ctx, paths, level * segment, divergence - 1, leaves):
            break
    late = {}
    for number in range(len(paths), leaves):
        rng = ctx.aside(f"fork {number}").rng
        path = rng.choice([*paths.values()])
        ends = range(min(depth - 1, max(0, sum(len(action.tokens) for action in path) - 1) // segment) + 1)
        late[number] = cut(path, segment * rng.choice(ends))
    paths |= await grown(tree, ctx, late)
    emit(tree, ctx, [paths.values()])
