"""The ways to answer a question. Each grows the question's tree, whose actions are all chosen; the
last one ends the response that is scored. Here is the papers' agent; their untrained baselines,
which only tables of a paper need, are in ``research/qa_methods``.
"""

import importlib
from collections.abc import Awaitable, Callable

import msgspec

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree


class How(msgspec.Struct, frozen=True):
    """topk: passages per search. budget: most searches per question, for search most turns. forced:
    a used-up budget forces an answer."""

    topk: int = 3
    budget: int = 4
    forced: bool = True


class Method(msgspec.Struct, frozen=True):
    """retrieves: whether it asks for passages. prompts: a hex digest of its prompts, if they are
    its own."""

    answer: Callable[[Tree, Context, How], Awaitable[None]]
    retrieves: bool = True
    prompts: str = ""


def load(name: str) -> Method:
    """Return the method of a name. Raises ValueError that names all methods."""
    if name == "search":
        return Method(search)
    baselines = importlib.import_module("coppice.research.qa_methods").METHODS
    if name not in baselines:
        expected = ",".join(sorted(["search", *baselines]))
        raise ValueError(f"--method {name}: expected some of {expected}")
    return baselines[name]


async def search(tree: Tree, ctx: Context, how: How) -> None:
    """Search-R1's agent, as runs train it: think, then search or answer, in one growing text
    (methods.md 1.5, 1.7, 2.1).

    With ``forced`` this is SLATE's evaluation: ``budget`` turns and then a forced answer. Otherwise
    it is PPR's: ``budget`` turns, the last one without a search, and no forced answer.
    """
    await ctx.plant()
    node = await ctx.tip()
    while True:
        if how.forced:
            place = await ctx.onward(node)
        elif node.kind != "action":
            place = node
        else:
            place = await ctx.step(node) if node.step < how.budget else None
        if place is None:
            return
        (node,) = await ctx.generate(place, 1)
        node.chosen = True
        ctx.save([node])
