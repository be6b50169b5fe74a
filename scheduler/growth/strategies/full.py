"""Full trajectories: k independent episodes of one task, with every turn judged. They form one
group when all are done.

This is GRPO's usual sampling, and SLATE's ablation (a): R(tau) = sum_t r_t (methods.md 1.6). Each
trajectory has its own randomness.
"""

from coppice.common.concurrency import gather
from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.strategies.chain import episode
from coppice.scheduler.growth.tree import Tree


def gives(k: int, **_: object) -> StrategyGives:
    """Declare ``k`` trajectories per task."""
    return StrategyGives(group="task", size=k, reward_options=frozenset({"bonus"}))


async def grow(tree: Tree, ctx: Context, k: Count = 5, bonus: float = 0.1) -> None:
    """Grow all trajectories, then emit them as one group. bonus: see ``rewards.composite``."""
    if not tree.groups:
        work = (episode(tree, ctx.derive(f"trajectory {i}"), bonus, i) for i in range(k))
        ctx.emit(await gather(work))
