"""Chain of thought (Wei et al., 2022): reasoning, then the answer, without retrieval. An
instruction replaces the worked examples."""

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.qa.methods import How, ask, filled

RETRIEVES = False


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Answer in one reply."""
    await ask(tree, ctx, filled("cot", question=ctx.task.question))
