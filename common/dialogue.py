"""Conversations of agents as they come over HTTP: which of them are the same, and what stands
between two replies in the policy's tokens.

An agent sends its whole history with every call, in its own way: arguments of calls parsed and
written again, ids of calls of its own, "" for null. ``histories`` recognises equal histories, so
that the sampled tokens of a reply are taken, never a second rendering of its text.
"""

import functools
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]
REPLY = "\u2063reply\u2063"
"""Stands for a sampled reply where the text after it is rendered. No tokenizer sees it."""
DEEPEST = 100
"""The most lists and objects inside each other of a JSON value in a conversation. Tools need a
dozen; Python ends at about 1,000, at a place that depends on who calls."""
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep, which no tool needs"
THOUGHT = "</think>"
"""Ends the thoughts of a reply. The chat template may have begun them."""
_OURS = "messages add_generation_prompt bos_token eos_token raise_exception strftime_now".split()
"""The variables and functions of a template that a caller may not replace."""


def text_of(content: Any) -> str:
    """Return a message's content as text: null is "", and the texts of parts are joined. Raises
    ValueError for other kinds of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError("`content`: expected a text, null, or a list of text parts")


def until(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return a text up to the first of the strings that end it, and this string ("" if none)."""
    places = [(text.find(one), one) for one in stop if one in text]
    place, ended = min(places, default=(len(text), ""))
    return text[:place], ended


def histories(messages: Sequence[Message], tools: Tools = ()) -> list[str]:
    """Return a digest of every beginning of a conversation, the empty one first. Equal digests mean
    equal roles, texts, calls and tools.

    The arguments of calls count as parsed JSON and ids of calls by their order. Of a reply only its
    text and its calls count, without its thoughts and the white space around it, because clients
    leave these out or write them anew.
    """
    state = hashlib.blake2b(_written(list(tools)), digest_size=16)
    digests, ids = [state.hexdigest()], dict[str, int]()
    for message in messages:
        state.update(_written(_canonical(message, ids)))
        digests.append(state.hexdigest())
    return digests


def _canonical(message: Message, ids: dict[str, int]) -> list[Any]:
    calls = []
    for call in message.get("tool_calls") or []:
        ids.setdefault(str(call.get("id")), len(ids))
        calls.append([call["function"]["name"], _meant(call["function"].get("arguments"))])
    answered, text = message.get("tool_call_id"), text_of(message.get("content"))
    if message.get("role") == "assistant":
        text = text.rpartition(THOUGHT)[2].strip()
    answers = None if answered is None else ids.get(str(answered), answered)
    return [message.get("role"), text, calls, answers]


def arguments(written: Any) -> Any:
    """Return the arguments of a call as the JSON value that they mean, or as they are if they are
    no JSON. Raises ValueError if they are nested too deep."""
    if not isinstance(written, str):
        return written
    try:
        value = json.loads(written)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        return written
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def is_too_deep(value: Any, left: int = DEEPEST) -> bool:
    """Return whether a JSON value has more than ``left`` lists and objects inside each other."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not left or any(is_too_deep(one, left - 1) for one in inside)


def _meant(written: Any) -> Any:
    """Return the arguments of a call so that equal ones are equal for every client: 1.0 is 1, as in
    JavaScript, which has one kind of number."""
    return json.loads(json.dumps(arguments(written)), parse_int=_number, parse_float=_number)


def _number(written: str) -> float | str:
    value = float(written)
    return value + 0.0 if math.isfinite(value) else written  # -0.0 is 0, too


def _written(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


class ChatTemplate:
    """The chat template of one model folder, rendered in a sandbox, as transformers does.
    available: whether the folder has one. source: its text. variables: the switches that it reads.
    """

    def __init__(self, folder: Path, now: time.struct_time | None = None):
        """now: the date that templates write, if not that of each call."""
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.is_file() else {}
        self._special = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
        source, path = settings.get("chat_template"), folder / "chat_template.jinja"
        if path.is_file():
            source = path.read_text()
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        dated = time.strftime if now is None else lambda form: time.strftime(form, now)
        sandbox.globals |= {"raise_exception": _raise, "strftime_now": dated}
        self.available = isinstance(source, str)
        self.source = source if isinstance(source, str) else ""
        self._template = sandbox.from_string(self.source)
        read = jinja2.meta.find_undeclared_variables(sandbox.parse(self.source))
        self.variables = read.difference(_OURS)

    def render(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt. variables: the template's switches. Raises ValueError when the
        template refuses the messages or lacks a switch."""
        if unknown := sorted(set(variables) - self.variables):
            raise ValueError(
                f"`chat_template_kwargs`: {unknown}: this model's template reads"
                f" {sorted(self.variables) or 'none'}"
            )
        try:
            return self._template.render(
                **self._special, **variables, messages=list(messages), add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(str(error)) from None


def _content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(reason: str) -> NoReturn:
    """Templates call this function to refuse a conversation."""
    raise jinja2.TemplateError(reason)


class Renderer:
    """Renders conversations with a model's chat template. Where the template knows no tools, they
    stand in the system message and calls in the texts, in the notation of Hermes, which Qwen's
    templates have too: ``<tool_call>{"name": .., "arguments": ..}</tool_call>``."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self.knows_tools = "tools" in template.variables

    def whole(
        self, messages: Sequence[Message], tools: Tools = (), switches: Mapping[str, Any] = {}
    ) -> str:
        """Return the prompt of a conversation. switches: of the template. Raises ValueError when
        the template refuses it."""
        offered = {"tools": list(tools)} if tools and self.knows_tools else {}
        return self.template.render(self.plain(messages, tools), {**switches, **offered})

    def after(self, tail: Sequence[Message], switches: Mapping[str, Any] = {}) -> str:
        """Return the text that follows a reply's own text: what ends the reply, the messages of
        ``tail``, and the opening of the next reply.

        Raises ValueError when the template refuses these messages by themselves, or does not write
        a reply's text as it is.
        """
        dummy = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
        shown = self.template.render([*dummy, *self.plain(tail)], switches)
        _, found, after = shown.partition(REPLY)
        if not found:
            raise ValueError("the chat template does not write replies as they are")
        return after

    def plain(self, messages: Sequence[Message], tools: Tools = ()) -> list[Message]:
        """Return the messages as the template is given them."""
        plain = [{**message, "content": text_of(message.get("content"))} for message in messages]
        if self.knows_tools:
            return [_with_parsed_calls(message) for message in plain]
        plain = [_as_text(message) for message in plain]
        if not tools:
            return plain
        system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
        return [{"role": "system", "content": f"{system}\n\n{_described(tools)}".strip()}, *plain]


def _with_parsed_calls(message: Message) -> Message:
    """A message with the arguments of its calls as values, as templates expect them."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        parsed = function | {"arguments": arguments(function.get("arguments"))}
        calls.append(call | {"function": parsed})
    return message | {"tool_calls": calls} if calls else message


def _as_text(message: Message) -> Message:
    """A message without calls, which stand in its text."""
    if message.get("role") == "tool":
        said = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": said}
    if not message.get("tool_calls"):
        return message
    parts = [message["content"]]
    for call in message["tool_calls"]:
        function = call["function"]
        value = {"name": function["name"], "arguments": arguments(function.get("arguments"))}
        parts.append(f"<tool_call>\n{json.dumps(value)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(filter(None, parts))}


def _described(tools: Tools) -> str:
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return (
        f"You may call functions. They are:\n<tools>\n{listed}\n</tools>\n"
        "For each call write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    )
