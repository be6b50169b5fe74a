"""Full trajectories: k independent episodes of one task, each turn judged; one group when all are done.

The usual sampling of GRPO, and SLATE's ablation (a): R(tau) = sum_t r_t (methods.md 1.6). Each trajectory has randomness of its own.
"""

from scheduler.context import Context
from scheduler.strategies.chain import episode
from scheduler.together import together
from scheduler.tree import Tree
from wire.declared import StrategyGives
from wire.numbers import Count


def gives(k: int, **_: object) -> StrategyGives:
    """``k`` trajectories of each task."""
    return StrategyGives(group="task", size=k, reward_options=frozenset({"bonus"}))


async def grow(tree: Tree, ctx: Context, k: Count = 5, bonus: float = 0.1) -> None:
    """Grow the trajectories that are not done yet, then emit them as one group. bonus: see ``scheduler.rewards.composite``."""
    if not tree.groups:
        ctx.emit(await together(episode(tree, ctx.aside(f"trajectory {i}"), bonus, i) for i in range(k)))
