"""Tool calls in a model's reply: which family writes them how, and a strict reading.

A reply is text, then calls. Each family has a mark with which a call begins; a reply without the
mark has no calls. From the mark on everything must be calls in the family's notation, of tools that
were offered, with an object of arguments: otherwise the reply is invalid, and no call of it counts.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from coppice.common.dialogue import THOUGHT, TOO_DEEP, is_too_deep


class ToolCall(msgspec.Struct, frozen=True):
    """One call. arguments: JSON text of an object, as the model wrote it."""

    name: str
    arguments: str


class Parsed(msgspec.Struct, frozen=True):
    """A reply. think: what it thought, up to "</think>"; text: between that and the calls. problem:
    why its calls cannot be read, "" if they can; then ``text`` is all after the thought."""

    text: str
    calls: list[ToolCall] = []
    problem: str = ""
    think: str = ""


class Family(msgspec.Struct, frozen=True):
    """How a family writes calls: ``mark`` and ``gap`` before the first, ``closing`` after each,
    ``between`` them, ``end`` at last. key: of the arguments. bare: a reply that is nothing but
    calls has no mark."""

    mark: str
    closing: str = ""
    between: str = ""
    end: str = ""
    gap: str = ""
    key: str = "arguments"
    bare: bool = False

    def values(self, text: str) -> list[Any]:
        """Return the JSON values of all calls in ``text``, which begins with the mark. Raises
        ValueError if anything else stands there."""
        values, rest = list[Any](), text.strip().removeprefix(self.mark).strip()
        while rest and not (self.end and rest == self.end):
            rest = _without(rest, self.between, optional=not values)
            value, place = _DECODER.raw_decode(rest)
            values.append(value)
            rest = _without(rest[place:].lstrip(), self.closing)
        if not values:
            raise ValueError(f"{self.mark} without a call")
        if rest != self.end:
            raise ValueError(f"expected {self.end} at the end")
        return values


_DECODER = json.JSONDecoder()
_BARE = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"(\s*,\s*"parameters")?')


def _without(text: str, beginning: str, optional: bool = False) -> str:
    if not text.startswith(beginning) and not optional:
        raise ValueError(f"expected {beginning} and nothing else there, got {text[:40]!r}")
    return text.removeprefix(beginning).lstrip()


FAMILIES = {
    "hermes": Family("<tool_call>", closing="</tool_call>", between="<tool_call>", gap="\n"),
    "llama3": Family("<|python_tag|>", between=";", key="parameters", bare=True),
    "mistral": Family("[TOOL_CALLS][", between=",", end="]"),
}
"""By name. Qwen, SmolLM3 and others write calls as Hermes does."""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
"""What ``parse`` reads and some tokenizers count among the special tokens, which are no text."""


def family_of(template: str) -> str:
    """Return the family of a chat template's source; "hermes" if it knows no tools, because they
    are then described in that notation."""
    if '"parameters": dictionary of' in template:  # some of Llama 3's do not name the mark
        return "llama3"
    return next((name for name, family in FAMILIES.items() if family.mark in template), "hermes")


def opening(family: str, offered: Sequence[str]) -> str:
    """Return how a reply begins that is a call: up to the arguments of the only tool that is
    offered, or up to the name of one of several. It ends where tokens end in what the family
    writes."""
    kind = FAMILIES[family]
    begun = '{"name":' if kind.bare else f'{kind.mark}{kind.gap}{{"name":'
    if len(offered) != 1:
        return begun
    return f'{begun} {json.dumps(offered[0], ensure_ascii=False)}, "{kind.key}":'


def parse(reply: str, family: str, offered: Collection[str]) -> Parsed:
    """Read a reply whose ``MARKS`` are still in it. offered: names of the tools."""
    kind, (think, ended, said) = FAMILIES[family], reply.partition(THOUGHT)
    think, said = (think.partition("<think>")[2] or think, said.lstrip()) if ended else ("", reply)
    place = said.find(kind.mark) if offered else -1
    bare = _BARE.match(said) if place < 0 and offered and kind.bare else None
    if bare is not None and (bare[2] or bare[1] in offered):
        place = 0
    if place < 0:
        return Parsed(said, think=think.strip())
    try:
        calls = [_call(value, kind.key, offered) for value in kind.values(said[place:])]
    except (ValueError, RecursionError) as error:
        return Parsed(said, problem=str(error), think=think.strip())
    return Parsed(said[:place].rstrip(), calls, think=think.strip())


def _call(value: Any, key: str, offered: Collection[str]) -> ToolCall:
    if not isinstance(value, dict) or set(value) != {"name", key}:
        raise ValueError(f'expected an object of "name" and "{key}", got {json.dumps(value)[:80]}')
    if value["name"] not in offered:
        raise ValueError(
            f"tool {value['name']!r} was not offered; there are {', '.join(sorted(offered))}"
        )
    if not isinstance(value[key], dict):
        raise ValueError(f'"{key}" of {value["name"]}: expected an object')
    if is_too_deep(value[key]):
        raise ValueError(f'"{key}" of {value["name"]}: {TOO_DEEP}')
    # no client reads NaN or Infinity
    arguments = json.dumps(value[key], ensure_ascii=False, allow_nan=False)
    # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair, which is no text
    arguments.encode()
    return ToolCall(value["name"], arguments)
