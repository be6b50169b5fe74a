"""Tree-GRPO's sampling (arXiv 2509.21240): ``trees`` chains of each question, which grow in
``rounds`` rounds by whole turns.

In each round every tree draws ``nodes`` of its places, uniformly with replacement, among the prompt
and the ends of all turns but the last, and continues each to the end. Each tree is one group, so
the scheme ``tree_grpo`` can compare leaves within their tree and over all trees.
"""

from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count, Natural
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.forks import distinct, emit, grown
from coppice.scheduler.growth.tree import Fork, Tree


def gives(trees: int, nodes: int, rounds: int, **_: object) -> StrategyGives:
    """Declare trees (1 + nodes rounds) whole trajectories per task."""
    return StrategyGives(group="task", size=trees * (1 + nodes * rounds))


async def grow(
    tree: Tree, ctx: Context, trees: Count = 2, nodes: Count = 2, rounds: Natural = 1
) -> None:
    """Grow all trees of one question to their ends, then emit each as a group."""
    leaves = await grown(tree, ctx, dict.fromkeys(range(trees)))
    members = [[number] for number in leaves]
    for _ in range(rounds):
        forks: dict[int, Fork | None] = {}
        for numbers in members:
            actions = distinct(leaves[number] for number in numbers)
            places = {action.parent: action for action in actions}
            new = range(len(leaves) + len(forks), len(leaves) + len(forks) + nodes * bool(places))
            for number in new:
                forks[number] = Fork(ctx.derive(f"fork {number}").rng.choice([*places.values()]))
            numbers += new
        leaves |= await grown(tree, ctx, forks)
    emit(tree, ctx, ((leaves[number] for number in numbers) for numbers in members))
