"""How a question is answered: one file each, ``async def answer(tree, ctx, how)``, on the engine and retriever of any other evaluation.

Every generation is a chosen action of the question's tree; the last one ends the response that is scored. ``RETRIEVES`` says whether
passages are asked for.
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

from actors.environments.base import SPLIT
from scheduler.context import Context
from scheduler.tree import Node, Tree
from wire.messages import Passage

PROMPTS = Path(__file__).parent.parent / "prompts"
ANSWERED = ["</answer>"]
_THOUGHT = re.compile(r"^(\s*<think>)?.*?</think>|^\s*<think>.*", re.DOTALL)
"""What a model that thinks writes first; its template may have opened the block, its end may be missing."""


class How(msgspec.Struct, frozen=True):
    """topk: passages of a search. budget: searches of a question at most, turns for search. forced: a used-up budget forces an answer."""

    topk: int = 3
    budget: int = 4
    forced: bool = True


def known() -> list[str]:
    """The methods' names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Any:
    """The method's module. Raises ValueError naming the known ones."""
    if name not in known():
        raise ValueError(f"--method {name}: expected some of {','.join(known())}")
    return importlib.import_module(f"{__name__}.{name}")


def digest(name: str) -> str:
    """Hex digest of the prompts a method asks with."""
    texts = [path.read_text() for path in sorted(PROMPTS.glob(f"{name}*.txt"))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------------------------- what the methods share


def filled(name: str, **values: str) -> str:
    """A prompt file with its placeholders {key} filled in; what a value holds is never filled in again."""
    template = (PROMPTS / f"{name}.txt").read_text().strip()
    return re.sub("{(" + "|".join(values) + ")}", lambda found: values[found[1]], template)


def documents(passages: Iterable[Passage]) -> str:
    """Passages one a line, numbered, as a search shows them (methods.md 1.5)."""
    return "\n".join(f"Doc {i}(Title: {p.title}) {p.text}" for i, p in enumerate(passages, 1)) or "No results found."


async def ask(tree: Tree, ctx: Context, prompt: str, stop: Sequence[str] = ANSWERED, thinking: bool = True) -> Node:
    """The reply to a prompt of its own, which stands below the tree's empty root. thinking: False for a step, which is no answer."""
    thinking = thinking and ctx.settings.thinking
    text = ctx.shop.text.prompt([{"role": "user", "content": prompt.replace(SPLIT, " ")}], thinking)
    root = tree.nodes.get(0) or tree.add(None, "prompt", np.zeros(0, np.int32), "")
    shown = tree.add(root, "prompt", ctx.shop.text.encode(text), text, chosen=True)
    ctx.save([root, shown])
    return await say(tree, ctx, shown, stop)


async def say(tree: Tree, ctx: Context, place: Node, stop: Sequence[str] = ANSWERED) -> Node:
    """What the model goes on with after ``place``."""
    (sample,), cached = await ctx.sample(tree.prefix(place), 1, list(stop))
    made = tree.add(
        place, "action", sample.tokens, ctx.shop.text.decode(sample.tokens), logprobs=sample.logprobs,
        versions=sample.versions, sampled=np.ones(len(sample.tokens), bool), finish=sample.finish, cached=cached,
        chosen=True,
    )  # fmt: skip
    ctx.save([made])
    return made


def spoken(text: str) -> str:
    """A reply without the thinking before it and without blank lines around it."""
    return _THOUGHT.sub("", text, count=1).strip()


def show(tree: Tree, ctx: Context, node: Node, text: str) -> Node:
    """Text put after what the model said, for it to go on from."""
    made = tree.add(node, "observation", ctx.shop.text.encode(text), text, chosen=True)
    ctx.save([made])
    return made
