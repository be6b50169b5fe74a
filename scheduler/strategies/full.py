"""Full trajectories: k independent episodes of one question, each step judged; one group when all are done.

The usual sampling of GRPO, and SLATE's ablation (a): R(tau) = sum_t r_t (methods.md 1.6). With k = 1 it is the evaluation.
"""

import asyncio

from scheduler.context import Context
from scheduler.tree import Node, Tree


async def grow(tree: Tree, ctx: Context) -> None:
    """Grow the trajectories that are not done yet, then emit them as one group."""
    trajectories = await asyncio.gather(*(episode(tree, ctx, index) for index in range(ctx.settings.k)))
    ctx.emit(trajectories)


async def episode(tree: Tree, ctx: Context, trajectory: int) -> list[Node]:
    """One trajectory; returns its trained actions in order."""
    node = tree.tip(trajectory)
    while True:
        if node.kind == "action":
            advanced = await ctx.step(node)
            if advanced is None:
                break
            node = advanced
        if node.step >= ctx.settings.budget:
            await ctx.force_answer(node)
            break
        (node,) = await ctx.generate(node, 1, trajectory)
        await ctx.judge([node])
        node.chosen = True
        ctx.save([node])
    await ctx.log_outcome(tree.tip(trajectory))
    actions = [n for n in tree.path(tree.tip(trajectory)) if n.kind == "action" and not n.forced]
    if (
        "outcome" not in actions[-1].scores
    ):  # the policy did not answer within its budget; a forced answer is only logged
        actions[-1].scores["outcome"] = 0.0
        ctx.save([actions[-1]])
    return actions
