"""Direct inference ("DI" in PPR's Table 2): the answer alone, from what the model knows."""

from scheduler.context import Context
from scheduler.tree import Tree
from tools.evaluating.qa.methods import How, ask, filled

RETRIEVES = False


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Answer in one reply."""
    await ask(tree, ctx, filled("direct", question=ctx.task.question))
