"""Monte Carlo values (VPR's baseline MC-PR, methods.md 3.6): a chain, and from every state it visits ``continuations`` more by the policy.

V(s) is the mean outcome of the continuations from s, in non-thinking mode. Columns of each action: mc_value (of the state it acted
in) and mc_error (its standard error); the learner's scheme ``mc_pr`` takes the differences. Continuations are not trained and not
journaled; a resumed tree keeps the values it has.
"""

import math

from scheduler.context import Context
from scheduler.rollouts import outcomes, position_before
from scheduler.strategies import chain
from scheduler.together import Beside
from scheduler.tree import Node, Tree
from wire.declared import StrategyGives
from wire.numbers import Count


def gives(**_: object) -> StrategyGives:
    """One trajectory of each task, whose states have values."""
    return StrategyGives(group="task", purpose=frozenset({"mc_value", "mc_error"}), reward_options=frozenset({"bonus"}))


async def grow(tree: Tree, ctx: Context, continuations: Count = 100, bonus: float = 0.1) -> None:
    """Grow the chain; value its states meanwhile; emit it. bonus: see ``scheduler.rewards.composite``."""
    if tree.groups:
        return
    async with Beside() as beside:
        actions = await chain.episode(
            tree, ctx, bonus, 0, lambda action: beside.start(value(ctx, action, continuations))
        )
    ctx.emit([actions])


async def value(ctx: Context, action: Node, continuations: int) -> None:
    """The value of the state in which ``action`` was taken."""
    if action.forced or "mc_value" in action.scores:
        return
    aside = ctx.aside(f"value {action.id}")  # the chain's own draws do not depend on when continuations come back
    found = await outcomes(aside, position_before(ctx, action), continuations)
    mean = math.fsum(found) / len(found)
    variance = math.fsum((x - mean) ** 2 for x in found) / max(1, len(found) - 1)
    action.scores |= {"mc_value": mean, "mc_error": math.sqrt(variance / len(found))}
    ctx.save([action])
