"""Chain of thought (Wei et al., 2022): reasoning, then the answer, without retrieval. An
instruction replaces the worked examples."""

from scheduler.context import Context
from scheduler.tree import Tree
from tools.evaluating.qa.methods import How, ask, filled

RETRIEVES = False


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Answer in one reply."""
    await ask(tree, ctx, filled("cot", question=ctx.task.question))
