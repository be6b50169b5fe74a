"""ARPO's sampling (arXiv 2507.19849): ``initial`` whole trajectories, which fork after observations
that follow an uncertain turn.

H is the entropy of a turn's first ``first`` tokens over the ``top`` most probable tokens, divided
by log vocabulary. After each turn but the last, a trajectory gets a sibling from there on with
probability ``base`` + ``weight`` (H - H of its first turn), turn by turn until
there are ``budget`` trajectories. What is left of the budget are fresh trajectories. With top = 0,
-log p of the sampled tokens stands for the entropy, whose unbiased estimate it is: only the
embedded engine reports the most probable tokens.
"""

import math
from typing import Annotated

from msgspec import Meta

from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count, NotNegative, Share
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.forks import emit, grown, surprisal
from coppice.scheduler.growth.tree import Fork, Node, Tree


def gives(budget: int, initial: int, top: int, **_: object) -> StrategyGives:
    """Declare ``budget`` whole trajectories per task."""
    if initial > budget:
        raise ValueError(
            f"scheduler.strategy_options.initial = {initial}: expected at most budget = {budget}"
        )
    return StrategyGives(group="task", size=budget, needs_top=top > 0)


async def grow(
    tree: Tree,
    ctx: Context,
    budget: Count = 16,
    initial: Count = 8,
    base: Share = 0.5,
    weight: NotNegative = 0.5,
    top: Annotated[int, Meta(ge=0, le=20)] = 10,
    first: Count = 20,
) -> None:
    """Grow ``budget`` trajectories to their ends, then emit them as one group."""
    ctx.services.top = top
    vocabulary = ctx.runtime.text.tokenizer.get_vocab_size()

    def entropy(action: Node) -> float:
        values = surprisal(action) if action.entropies is None else action.entropies
        return float(values[:first].sum()) / math.log(vocabulary)

    leaves = await grown(tree, ctx, dict.fromkeys(range(initial)))
    for turn in range(1, max(map(len, leaves.values()))):
        forks: list[Fork] = []
        for number, actions in leaves.items():
            if turn < len(actions):
                chance = base + weight * (entropy(actions[turn - 1]) - entropy(actions[0]))
                rng = ctx.derive(f"branch {number} {turn}").rng
                forks += [Fork(actions[turn])] if rng.random() < chance else []
        new = forks[: budget - len(leaves)]
        leaves |= await grown(tree, ctx, dict(enumerate(new, len(leaves))))
    leaves |= await grown(tree, ctx, dict.fromkeys(range(len(leaves), budget)))
    emit(tree, ctx, [leaves.values()])
