"""IRCoT (Trivedi et al., 2022): retrieval and chain of thought in turns, each new sentence of reasoning being the next query.

1. Retrieve with the question. 2. Write the next sentence of reasoning from the passages so far; it ends the loop when it says what "the
answer is". 3. Retrieve with the sentence, add the passages that are new, go on at 2 until ``budget`` searches are made. 4. Read all
passages and answer, in a chat of its own (the paper's separate reader).

Simplified: an instruction instead of worked examples with distractors; a sentence ends at its first full stop before a space, or at the
line's end, so an abbreviation may cut it; the model reads with reasoning, as it reasons. A model that thinks is asked for a sentence
without; what it thinks all the same is no sentence.
"""

import re

from scheduler.context import Context
from scheduler.tree import Tree
from tools.evaluating.qa.methods import How, ask, documents, filled, spoken
from wire.messages import Passage

RETRIEVES = True
MOST_PASSAGES = 15
"""Kept in all, the first ones found (the paper's limit)."""
_SENTENCE_ENDS = (". ", ".\n")
"""An empty line is none: a reply may begin with one."""
_SENTENCE = re.compile(r"\s*(.*?[.!?])(\s|$)", re.DOTALL)


async def answer(tree: Tree, ctx: Context, how: How) -> None:
    """Reason and search in turns, then read."""
    question, thoughts, searches = ctx.task.question, "", 1
    found: dict[str, Passage] = {}
    _keep(found, await ctx.retrieve(question, how.topk))
    while searches < how.budget:
        prompt = filled("ircot_reason", documents=documents(found.values()), question=question, reasoning=thoughts)
        sentence = first_sentence(spoken((await ask(tree, ctx, prompt, stop=_SENTENCE_ENDS, thinking=False)).text))
        thoughts = f"{thoughts} {sentence}".strip()
        if not sentence or "answer is" in sentence.lower():
            break
        _keep(found, await ctx.retrieve(sentence, how.topk))
        searches += 1
    await ask(tree, ctx, filled("ircot_read", documents=documents(found.values()), question=question))


def _keep(found: dict[str, Passage], passages: list[Passage]) -> None:
    for passage in passages:
        if len(found) < MOST_PASSAGES:
            found.setdefault(passage.id, passage)


def first_sentence(text: str) -> str:
    """Up to the first full stop, question or exclamation mark before a space; else the first line."""
    line = text.strip().split("\n")[0]
    whole = _SENTENCE.match(line)
    return whole[1].strip() if whole else line.strip()
