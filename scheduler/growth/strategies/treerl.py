"""TreeRL's sampling (EPTree, arXiv 2506.11902): chains that fork where the policy was least certain
of a token.

In each round every tree takes the ``tokens`` tokens with the largest -log p among all that it
sampled, and samples ``continuations`` new continuations from before each of them, inside the turn.
All leaves form one group.
"""

import heapq

from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count, Natural
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.forks import distinct, emit, grown, surprisal
from coppice.scheduler.growth.tree import Fork, Tree


def gives(trees: int, tokens: int, rounds: int, continuations: int, **_: object) -> StrategyGives:
    """Declare trees (1 + rounds tokens continuations) whole trajectories per task."""
    return StrategyGives(group="task", size=trees * (1 + rounds * tokens * continuations))


async def grow(
    tree: Tree,
    ctx: Context,
    trees: Count = 6,
    tokens: Count = 2,
    rounds: Natural = 1,
    continuations: Count = 2,
) -> None:
    """Grow all trees, then emit their leaves. Tokens before a fork count for one tree once."""
    leaves = await grown(tree, ctx, dict.fromkeys(range(trees)))
    members = [[number] for number in leaves]
    for _ in range(rounds):
        forks: list[Fork] = []
        for numbers in members:
            actions = distinct(leaves[number] for number in numbers)
            own = (
                (surprise, action, at)
                for action in actions
                for at, surprise in enumerate(surprisal(action).tolist())
                if at >= action.kept
            )
            uncertain = heapq.nlargest(tokens, own, key=lambda token: token[0])
            new = [Fork(action, at) for _, action, at in uncertain for _ in range(continuations)]
            numbers += range(len(leaves) + len(forks), len(leaves) + len(forks) + len(new))
            forks += new
        leaves |= await grown(tree, ctx, dict(enumerate(forks, len(leaves))))
    emit(tree, ctx, [leaves.values()])
