"""The papers' untrained baselines of ``coppice evaluate qa``, on one engine and retriever.

Simplified: an instruction replaces the worked examples, and retriever and reader are used as they
are.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from coppice.actors.environments.base import SPLIT
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Node, Tree
from coppice.tools.evaluating.qa.methods import How, Method
from coppice.wire.messages import Passage

PROMPTS = Path(__file__).parent / "prompts"
ANSWERED = ["</answer>"]
_THOUGHT = re.compile(r"^(\s*<think>)?.*?</think>|^\s*<think>.*", re.DOTALL)
"""The thinking that a model writes first. The template may have opened the block already, and the
end of the block may be missing."""


def digest(name: str) -> str:
    """A hex digest of a method's prompts."""
    texts = [path.read_text() for path in sorted(PROMPTS.glob(f"{name}*.txt"))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------- shared by the methods


def filled(name: str, **values: str) -> str:
    """A prompt file with its placeholders {key} filled in. Placeholders inside the values are left
    alone."""
    template = (PROMPTS / f"{name}.txt").read_text().strip()
    return re.sub("{(" + "|".join(values) + ")}", lambda match: values[match[1]], template)


def documents(passages: Iterable[Passage]) -> str:
    """The passages, numbered, one per line, as a search shows them (methods.md 1.5)."""
    lines = [f"Doc {i}(Title: {p.title}) {p.text}" for i, p in enumerate(passages, 1)]
    return "\n".join(lines) or "No results found."


async def ask(
    tree: Tree, ctx: Context, prompt: str, stop: Sequence[str] = ANSWERED, thinking: bool = True
) -> Node:
    """Ask a separate prompt, a child of the tree's empty root. Returns the reply. thinking: False
    for an intermediate step."""
    thinking = thinking and ctx.settings.thinking
    text = ctx.runtime.text.prompt(
        [{"role": "user", "content": prompt.replace(SPLIT, " ")}], thinking
    )
    root = tree.nodes.get(0) or tree.add(None, "prompt", np.zeros(0, np.int32), "")
    shown = tree.add(root, "prompt", ctx.runtime.text.encode(text), text, chosen=True)
    ctx.save([root, shown])
    return await say(tree, ctx, shown, stop)


async def say(tree: Tree, ctx: Context, place: Node, stop: Sequence[str] = ANSWERED) -> Node:
    """Let the model continue after ``place``. Returns its text as a node."""
    (sample,), cached = await ctx.services.sample(tree.prefix(place), 1, list(stop))
    text = ctx.runtime.text.decode(sample.tokens)
    reply = tree.add(
        place, "action", sample.tokens, text, logprobs=sample.logprobs, versions=sample.versions,
        sampled=np.ones(len(sample.tokens), bool), finish=sample.finish, cached=cached, chosen=True,
    )  # fmt: skip
    ctx.save([reply])
    return reply


def spoken(text: str) -> str:
    """A reply without its thinking and without white space around it."""
    return _THOUGHT.sub("", text, count=1).strip()


# ---------------------------------------------------------------------------- methods of one prompt


async def direct(tree: Tree, ctx: Context, how: How) -> None:
    """Direct inference ("DI" in PPR's Table 2): the answer alone, from what the model knows."""
    await ask(tree, ctx, filled("direct", question=ctx.task.question))


async def cot(tree: Tree, ctx: Context, how: How) -> None:
    """Chain of thought (Wei et al., 2022): reasoning, then the answer, without retrieval."""
    await ask(tree, ctx, filled("cot", question=ctx.task.question))


async def rag(tree: Tree, ctx: Context, how: How) -> None:
    """Retrieval-augmented generation (Lewis et al., 2020), as in the papers' tables: the question
    is the query, then the passages are read."""
    passages = await ctx.services.retrieve(ctx.task.question, how.topk)
    await ask(tree, ctx, filled("rag", documents=documents(passages), question=ctx.task.question))


# ---------------------------------------------------------------------------- Iter-RetGen and IRCoT

_TAGS = re.compile(r"</?answer>")
MOST_PASSAGES = 15
"""The most passages that IRCoT keeps, in the order of retrieval (the paper's limit)."""
_SENTENCE_ENDS = (". ", ".\n")
"""An empty line does not end a sentence, because a reply may begin with one."""
_SENTENCE = re.compile(r"\s*(.*?[.!?])(\s|$)", re.DOTALL)


async def iter_retgen(tree: Tree, ctx: Context, how: How) -> None:
    """Iter-RetGen (Shao et al., 2023): each of ``budget`` rounds retrieves with the reply of the
    round before, joined with the question, and answers again. The first retrieves with the question
    alone; the last reply is the answer."""
    question, reply = ctx.task.question, ""
    for _ in range(how.budget):
        query = " ".join(f"{_TAGS.sub(' ', reply)} {question}".split())
        passages = await ctx.services.retrieve(query, how.topk)
        prompt = filled("iter_retgen", documents=documents(passages), question=question)
        reply = spoken((await ask(tree, ctx, prompt)).text)


async def ircot(tree: Tree, ctx: Context, how: How) -> None:
    """IRCoT (Trivedi et al., 2022) alternates retrieval and chain of thought: the next sentence of
    reasoning, written from the passages so far, is the next query, until it says "answer is" or
    ``budget`` searches are made. Then a separate chat reads all passages and answers.

    Simplified: a sentence ends at its first full stop before a space, or at the end of the line.
    The reader reasons before it answers. A thinking model is asked for a sentence without thinking.
    """
    question, thoughts, query = ctx.task.question, "", ctx.task.question
    kept: dict[str, Passage] = {}
    for searches in range(1, how.budget + 1):
        for passage in await ctx.services.retrieve(query, how.topk):
            if len(kept) < MOST_PASSAGES:
                kept.setdefault(passage.id, passage)
        if searches == how.budget:
            break
        shown = documents(kept.values())
        prompt = filled("ircot_reason", documents=shown, question=question, reasoning=thoughts)
        reply = await ask(tree, ctx, prompt, stop=_SENTENCE_ENDS, thinking=False)
        query = first_sentence(spoken(reply.text))
        thoughts = f"{thoughts} {query}".strip()
        if not query or "answer is" in query.lower():
            break
    shown = documents(kept.values())
    await ask(tree, ctx, filled("ircot_read", documents=shown, question=question))


def first_sentence(text: str) -> str:
    """The text up to the first full stop, question or exclamation mark before a space, else the
    first line."""
    line = text.strip().split("\n")[0]
    whole = _SENTENCE.match(line)
    return whole[1].strip() if whole else line.strip()


# ---------------------------------------------------------------------------------------- Search-o1

REPEATED = "This was searched before: see the result above."
USED_UP = "No more searches can be made. Answer with what is known."
_QUERY = re.compile(r"<search>((?:(?!<search>).)*)</search>\s*$", re.DOTALL)
_STOP = ["</search>", "</answer>"]
_SHOWN_REASONING = 2000
MORE_QUERIES = 5
"""A question may have at most this many more queries than searches."""


async def search_o1(tree: Tree, ctx: Context, how: How) -> None:
    """Search-o1 (Li et al., 2025): searches inside one chain of reasoning, with each result
    condensed by a separate generation.

    A second prompt ("reason in documents") gets passages, reasoning and query; the extract that it
    writes is inserted. A repeated query gets a notice and costs no search. A query beyond
    ``budget`` gets a notice too, and one more reply ends the chain. After ``budget`` + 5 queries
    the question ends (the paper's code: 10 searches, 15 turns).

    Simplified: <search> tags and a <result> block replace the paper's markers. The second prompt
    sees the last 2,000 characters of the reasoning, without thinking. No answer is forced.
    """
    prompt = filled("search_o1", question=ctx.task.question, budget=str(how.budget))
    node = await ask(tree, ctx, prompt, _STOP)
    searched: set[str] = set()
    result = ""
    for _ in range(how.budget + MORE_QUERIES):
        query = wanted(node.text)
        if query is None or result == USED_UP:
            return
        if query in searched:
            result = REPEATED
        elif len(searched) == how.budget:
            result = USED_UP
        else:
            result = await _condensed(tree, ctx, node, query, how.topk)
            searched.add(query)
        text = f"\n<result> {result} </result>\n"
        shown = tree.add(node, "observation", ctx.runtime.text.encode(text), text, chosen=True)
        ctx.save([shown])
        node = await say(tree, ctx, shown, _STOP)


async def _condensed(tree: Tree, ctx: Context, node: Node, query: str, topk: int) -> str:
    passages = await ctx.services.retrieve(query, topk)
    said = "".join(above.text for above in tree.path(node) if above.kind != "prompt")
    reasoning, shown = said[-_SHOWN_REASONING:], documents(passages)
    prompt = filled("search_o1_documents", reasoning=reasoning, query=query, documents=shown)
    return spoken((await ask(tree, ctx, prompt, stop=[], thinking=False)).text)


def wanted(text: str) -> str | None:
    """The query at the end of the text, or None."""
    match = _QUERY.search(text)
    return match[1].strip() or None if match else None


METHODS = {
    **{one.__name__: Method(one, False, digest(one.__name__)) for one in (cot, direct)},
    **{
        one.__name__: Method(one, True, digest(one.__name__))
        for one in (ircot, iter_retgen, rag, search_o1)
    },
}
