"""Retrieval-augmented generation (Lewis et al., 2020), as in the papers' tables: the question is
the query, then the passages are read.

Simplified: retriever and reader are used as they are; they are not trained together.
"""

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.qa.methods import How, ask, documents, filled

RETRIEVES = True


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Search once, then answer in one reply."""
    passages = await ctx.services.retrieve(ctx.task.question, how.topk)
    await ask(tree, ctx, filled("rag", documents=documents(passages), question=ctx.task.question))
