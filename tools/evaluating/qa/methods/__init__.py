"""Methods of answering a question. Each is a file with ``async def answer(tree, ctx, how)``; all
use the same engine and retriever.

Every generation is a chosen action of the question's tree. The last action ends the response that
is scored. The constant ``RETRIEVES`` says whether the method asks for passages.
"""

import hashlib
import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import SPLIT
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Node, Tree
from coppice.wire.messages import Passage

PROMPTS = Path(__file__).parent.parent / "prompts"
ANSWERED = ["</answer>"]
_THOUGHT = re.compile(r"^(\s*<think>)?.*?</think>|^\s*<think>.*", re.DOTALL)
"""The thinking that a model writes first. The template may have opened the block already, and the
end of the block may be missing."""


class How(msgspec.Struct, frozen=True):
    """topk: passages per search. budget: most searches per question, for search most turns. forced:
    a used-up budget forces an answer."""

    topk: int = 3
    budget: int = 4
    forced: bool = True


def known() -> list[str]:
    """The names of all methods."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Any:
    """The module of a method. Raises ValueError that names the known methods."""
    if name not in known():
        raise ValueError(f"--method {name}: expected some of {','.join(known())}")
    return importlib.import_module(f"{__name__}.{name}")


def digest(name: str) -> str:
    """A hex digest of a method's prompts."""
    texts = [path.read_text() for path in sorted(PROMPTS.glob(f"{name}*.txt"))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


# ----------------------------------------------------------------------------------------------
# shared by the methods


def filled(name: str, **values: str) -> str:
    """A prompt file with its placeholders {key} filled in. Placeholders inside the values are left
    alone."""
    template = (PROMPTS / f"{name}.txt").read_text().strip()
    return re.sub("{(" + "|".join(values) + ")}", lambda match: values[match[1]], template)


def documents(passages: Iterable[Passage]) -> str:
    """The passages, numbered, one per line, as a search shows them (methods.md 1.5)."""
    return (
        "\n".join(f"Doc {i}(Title: {p.title}) {p.text}" for i, p in enumerate(passages, 1))
        or "No results found."
    )


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
    reply = tree.add(
        place, "action", sample.tokens, ctx.runtime.text.decode(sample.tokens), logprobs=sample.logprobs,
        versions=sample.versions, sampled=np.ones(len(sample.tokens), bool), finish=sample.finish, cached=cached,
        chosen=True,
    )  # fmt: skip
    ctx.save([reply])
    return reply


def spoken(text: str) -> str:
    """A reply without its thinking and without white space around it."""
    return _THOUGHT.sub("", text, count=1).strip()


def show(tree: Tree, ctx: Context, node: Node, text: str) -> Node:
    """Append text after ``node`` that the model then reads. Returns the new node."""
    shown = tree.add(node, "observation", ctx.runtime.text.encode(text), text, chosen=True)
    ctx.save([shown])
    return shown
