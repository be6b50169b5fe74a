"""Direct inference ("DI" in PPR's Table 2): the answer alone, from what the model knows."""

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.qa.methods import How, ask, filled

RETRIEVES = False


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Answer in one reply."""
    await ask(tree, ctx, filled("direct", question=ctx.task.question))
