"""Iter-RetGen (Shao et al., 2023): each round retrieves with the reply of the round before, joined
with the question, and answers again.

The first round retrieves with the question alone. ``budget`` is the number of rounds; the last
reply is the answer. Simplified: an instruction replaces the worked examples.
"""

import re

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.qa.methods import How, ask, documents, filled, spoken

RETRIEVES = True
_TAGS = re.compile(r"</?answer>")


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Retrieve and answer ``how.budget`` times."""
    question, reply = ctx.task.question, ""
    for _ in range(how.budget):
        query = " ".join(f"{_TAGS.sub(' ', reply)} {question}".split())
        passages = await ctx.services.retrieve(query, how.topk)
        prompt = filled("iter_retgen", documents=documents(passages), question=question)
        reply = spoken((await ask(tree, ctx, prompt)).text)
