"""Full trajectories: k independent episodes of one task, each turn judged; one group when all are done.

The usual sampling of GRPO, and SLATE's ablation (a): R(tau) = sum_t r_t (methods.md 1.6). Each trajectory has randomness of its own.
"""

from scheduler.context import Context
from scheduler.strategies.chain import episode
from scheduler.together import together
from scheduler.tree import Tree


async def grow(tree: Tree, ctx: Context) -> None:
    """Grow the trajectories that are not done yet, then emit them as one group."""
    if not tree.groups:
        ctx.emit(await together(episode(tree, ctx.aside(f"trajectory {i}"), i) for i in range(ctx.settings.k)))
