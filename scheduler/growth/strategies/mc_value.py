"""Monte Carlo values (VPR's baseline MC-PR, methods.md 3.6): a chain, with ``continuations``
further episodes from every state it visits.

V(s) is the mean outcome of the policy's continuations from s, in non-thinking mode. Each action
gets two columns: mc_value, the value of the state in which the action was taken, and mc_error, its
standard error. The learner's scheme ``mc_pr`` takes the differences. Continuations are neither
trained nor journaled; a resumed tree keeps the values it has.
"""

import math

from coppice.common.concurrency import TaskGroup
from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.rollouts import outcomes, position_before
from coppice.scheduler.growth.strategies import chain
from coppice.scheduler.growth.tree import Node, Tree
from coppice.wire.faults import DataFault


def gives(**_: object) -> StrategyGives:
    """Declare one trajectory per task, whose states have values."""
    return StrategyGives(
        group="task",
        purpose=frozenset({"mc_value", "mc_error"}),
        reward_options=frozenset({"bonus"}),
    )


async def grow(tree: Tree, ctx: Context, continuations: Count = 100, bonus: float = 0.1) -> None:
    """Grow the chain and value its states meanwhile. bonus: see ``rewards.composite``."""
    if tree.groups:
        return
    async with TaskGroup() as group:
        actions = await chain.episode(
            tree, ctx, bonus, 0, lambda action: group.start(value(ctx, action, continuations))
        )
    ctx.emit([actions])


async def value(ctx: Context, action: Node, continuations: int) -> None:
    """Estimate the value of the state before ``action``, and write it to the action's columns."""
    if action.forced or "mc_value" in action.scores:
        return
    # so the chain's draws do not depend on when continuations come back
    valuing = ctx.derive(f"value {action.id}")
    samples = await outcomes(valuing, position_before(ctx, action), continuations)
    if not samples:
        raise DataFault(
            "no continuation of an action has an outcome: expected an environment that gives one,"
            " or repeats itself"
        )
    mean = math.fsum(samples) / len(samples)
    variance = math.fsum((x - mean) ** 2 for x in samples) / max(1, len(samples) - 1)
    action.scores |= {"mc_value": mean, "mc_error": math.sqrt(variance / len(samples))}
    ctx.save([action])
