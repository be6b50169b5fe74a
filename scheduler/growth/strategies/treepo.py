"""TreePO's sampling (arXiv 2508.17445): segments of fixed length; after each one, every unfinished
path divides until there are ``leaves``.

A segment is ``segment`` sampled tokens of a trajectory, over the ends of turns; observations do not
count. The number of the first paths is drawn uniformly from ``divergence`` to ``first_divergence``,
or ``leaves`` if these are fewer. After a segment, ``divergence`` children of each unfinished path,
and of each path that ended within the segment, are shared evenly among the unfinished paths; the
last one gets the remainder. When all paths have ended before there are enough leaves, further ones
fork by ``divergence`` from random segment ends of the paths in random order. All leaves form one
group. The numbers are those of multimodal-art-projection/TreePO
(``generate_sequences_tree_deepth_first_vanilla_mode``).
"""

from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.forks import cut, emit, grown, onward
from coppice.scheduler.growth.tree import Fork, Tree


def gives(leaves: int, divergence: int, first_divergence: int, **_: object) -> StrategyGives:
    """Declare ``leaves`` whole trajectories per task."""
    if first_divergence < divergence:
        setting = f"scheduler.strategy_options.first_divergence = {first_divergence}"
        raise ValueError(f"{setting}: expected at least divergence = {divergence}")
    return StrategyGives(group="task", size=leaves)


async def grow(
    tree: Tree,
    ctx: Context,
    leaves: Count = 16,
    segment: Count = 512,
    depth: Count = 14,
    divergence: Count = 2,
    first_divergence: Count = 8,
) -> None:
    """Grow the tree to its leaves. depth: after how many segments no path divides any more."""
    most = max(divergence, min(leaves, first_divergence))
    first = ctx.derive("first divergence").rng.randint(divergence, most)
    paths = await grown(tree, ctx, dict.fromkeys(range(min(leaves, first))))
    unfinished = len(paths)
    for level in range(1, depth):
        places = [*onward(paths, level * segment).values()]
        if not places or len(paths) >= leaves:
            break
        room = leaves - (len(paths) - len(places))
        each, spare = divmod(max(len(places), min(room, divergence * unfinished)), len(places))
        forks = [fork for fork in places for _ in range(each - 1)] + places[-1:] * spare
        unfinished = len(places) + len(forks)
        paths |= await grown(tree, ctx, dict(enumerate(forks, len(paths))))
    rng, late = ctx.derive("late forks").rng, list[Fork | None]()
    for number in rng.sample([*paths], len(paths)) * leaves:
        length = sum(len(action.tokens) for action in paths[number])
        end = segment * rng.randint(0, min(depth - 1, max(0, length - 1) // segment))
        late += [cut(paths[number], end)] * divergence
    paths |= await grown(tree, ctx, dict(zip(range(len(paths), leaves), late, strict=False)))
    emit(tree, ctx, [paths.values()])
