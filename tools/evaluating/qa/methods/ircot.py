"""IRCoT (Trivedi et al., 2022) alternates retrieval and chain of thought: each new sentence of
reasoning is the next query.

1. Retrieve with the question. 2. Write the next sentence of reasoning from the passages so far; a
sentence with "answer is" ends the loop. 3. Retrieve with the sentence, add the new passages, and
repeat from 2 until ``budget`` searches are made. 4. Read all passages and answer, in a separate
chat (the paper's separate reader).

Simplified: an instruction replaces worked examples with distractors. A sentence ends at its first
full stop before a space, or at the end of the line, so an abbreviation may cut it. The reader
reasons before it answers. A thinking model is asked for a sentence without thinking; any thinking
that it writes nevertheless is removed.
"""

import re

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.qa.methods import How, ask, documents, filled, spoken
from coppice.wire.messages import Passage

RETRIEVES = True
MOST_PASSAGES = 15
"""The largest number of passages that are kept, in the order of retrieval (the paper's limit)."""
_SENTENCE_ENDS = (". ", ".\n")
"""An empty line does not end a sentence, because a reply may begin with one."""
_SENTENCE = re.compile(r"\s*(.*?[.!?])(\s|$)", re.DOTALL)


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Reason and search in turns, then read the passages and answer."""
    question, thoughts, searches = ctx.task.question, "", 1
    kept: dict[str, Passage] = {}
    _keep(kept, await ctx.services.retrieve(question, how.topk))
    while searches < how.budget:
        prompt = filled(
            "ircot_reason",
            documents=documents(kept.values()),
            question=question,
            reasoning=thoughts,
        )
        sentence = first_sentence(
            spoken((await ask(tree, ctx, prompt, stop=_SENTENCE_ENDS, thinking=False)).text)
        )
        thoughts = f"{thoughts} {sentence}".strip()
        if not sentence or "answer is" in sentence.lower():
            break
        _keep(kept, await ctx.services.retrieve(sentence, how.topk))
        searches += 1
    await ask(
        tree, ctx, filled("ircot_read", documents=documents(kept.values()), question=question)
    )


def _keep(kept: dict[str, Passage], passages: list[Passage]) -> None:
    for passage in passages:
        if len(kept) < MOST_PASSAGES:
            kept.setdefault(passage.id, passage)


def first_sentence(text: str) -> str:
    """The text up to the first full stop, question or exclamation mark before a space, else the
    first line."""
    line = text.strip().split("\n")[0]
    whole = _SENTENCE.match(line)
    return whole[1].strip() if whole else line.strip()
