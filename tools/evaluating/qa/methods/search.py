"""Search-R1's agent, as runs train it: think, then search or answer, in one growing text
(methods.md 1.5, 1.7, 2.1).

With ``forced`` this is SLATE's evaluation: ``budget`` turns and then a forced answer. Otherwise it
is PPR's: ``budget`` turns, the last one without a search, and no forced answer.
"""

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Node, Tree
from coppice.tools.evaluating.qa.methods import How

RETRIEVES = True


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Grow one trajectory from the question to its end."""
    await ctx.plant()
    node = await ctx.tip()
    while (
        place := await (ctx.onward(node) if how.forced else _onward(ctx, node, how.budget))
    ) is not None:
        (node,) = await ctx.generate(place, 1)
        node.chosen = True
        ctx.save([node])


async def _onward(ctx: Context, node: Node, budget: int) -> Node | None:
    if node.kind != "action":
        return node
    return await ctx.step(node) if node.step < budget else None
