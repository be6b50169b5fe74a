"""Calls in a reply: BFCL's Python form ``[f(a=1), g(b='x')]``, or a model family's own notation.
Texts are parsed into names and literals, and nothing of them is evaluated."""

import ast
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from coppice.common.dialogue import THOUGHT, arguments
from coppice.common.tool_calls import FAMILIES, parse

PYTHON = "python"
MOST = 40
"""The most calls of one reply; references need 34."""
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class FunctionCall(msgspec.Struct, frozen=True):
    """One call. arguments: the Python literal of a dictionary."""

    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return ast.literal_eval(self.arguments)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.values().items())})"


@functools.lru_cache(4096)
def read(form: str, reply: str, offered: tuple[str, ...]) -> tuple[tuple[FunctionCall, ...], str]:
    """Return the calls of a reply, and why its calls cannot be read ("" if they can, or if the
    reply is no attempt to call).

    form: "python", read as the leaderboard reads it: the brackets may be missing, arguments without
    a name do not count, and a bare name is a text. Or a family of ``common.tool_calls``, which must
    call an ``offered`` function.
    """
    if form == PYTHON:
        text, calls, problem = reply.rpartition(THOUGHT)[2].strip("` \n"), [], ""
        begun, ended = text.startswith("["), text.endswith("]")
        try:
            body = _expression(f"{'[' * (not begun)}{text}{']' * (not ended)}")
            calls = [_call(one)[0] for one in body.elts]
        except (*_UNREADABLE, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}" * begun
    else:
        parsed = parse(reply, form, offered)
        calls = [FunctionCall(one.name, repr(arguments(one.arguments))) for one in parsed.calls]
        problem = parsed.problem
    return (tuple(calls), problem) if len(calls) <= MOST else ((), f"more than {MOST} calls")


def write(form: str, calls: Sequence[FunctionCall]) -> str:
    """Return a reply of calls, which ``read`` reads."""
    if form == PYTHON:
        return f"[{', '.join(map(str, calls))}]"
    family = FAMILIES[form]
    values = [json.dumps({"name": call.name, family.key: call.values()}) for call in calls]
    whole = f"{family.between}{family.gap}".join(f"{v}{family.gap}{family.closing}" for v in values)
    return f"{family.mark}{family.gap}{whole}{family.end}"


def bound(text: str, methods: Mapping[str, Callable[..., Any]]) -> FunctionCall:
    """Return a reference's call, whose arguments may lack names, with those of its method."""
    call, unnamed = _call(_expression(text.strip()))
    named = inspect.signature(methods[call.name]).bind(*unnamed, **call.values())
    return FunctionCall(call.name, repr({**named.arguments}))


def _expression(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the policy's strings
        return ast.parse(text, mode="eval").body


def _call(node: Any) -> tuple[FunctionCall, list[Any]]:
    """Return a call, and its arguments that have no name."""
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no name of a function")
    values = {str(one.arg): _literal(one.value) for one in node.keywords}
    return FunctionCall(name, repr(values)), [_literal(one) for one in node.args]


class _NamesAsTexts(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(node.id)


def _literal(node: ast.expr) -> Any:
    value = ast.literal_eval(_NamesAsTexts().visit(node))
    json.dumps(value, allow_nan=False)  # refuses what no tool takes: bytes, sets, infinity
    return value
