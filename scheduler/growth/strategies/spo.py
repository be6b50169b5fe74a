"""SPO-tree's sampling (arXiv 2505.23564): a tree with a fixed number of children at each of its
first levels; edges are token segments.

branching[0] paths leave the prompt, and after each further ``segment`` sampled tokens every
unfinished path divides into branching[1], branching[2], ... The column ``weight`` of a leaf is 1 /
the product of the branchings above it: with it, the mean over the leaves below a node is the mean
over its children, also where some paths end early.
"""

import math

from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.forks import emit, grown, onward
from coppice.scheduler.growth.tree import Tree


def gives(branching: tuple[int, ...], **_: object) -> StrategyGives:
    """Declare whole trajectories per task: the product of the branchings if no path ends early."""
    if not branching:
        raise ValueError("scheduler.strategy_options.branching = []: expected numbers of children")
    return StrategyGives(group="task", size=math.prod(branching), columns=frozenset({"weight"}))


async def grow(
    tree: Tree, ctx: Context, branching: tuple[Count, ...] = (6, 6, 6), segment: Count = 66
) -> None:
    """Grow the tree to its leaves, then emit them as one group."""
    leaves = await grown(tree, ctx, dict.fromkeys(range(branching[0])))
    weight = dict.fromkeys(leaves, 1 / branching[0])
    for level, width in enumerate(branching[1:], 1):
        forks, first = onward(leaves, level * segment), len(leaves)
        left = [number for number in forks for _ in range(width - 1)]
        leaves |= await grown(tree, ctx, dict(enumerate([forks[number] for number in left], first)))
        shared = {number: weight[number] / width for number in forks}
        weight |= shared | {new: shared[number] for new, number in enumerate(left, first)}
    for number, actions in leaves.items():
        if actions:
            actions[-1].scores["weight"] = weight[number]
            ctx.changed([actions[-1]])
    emit(tree, ctx, [leaves.values()])
