"""What agents and their libraries ask, read from the bodies of /v1/chat/completions and
/v1/responses. Fields that do not change what is asked are ignored.

Clients write one conversation in many ways: part lists, null, other names of roles, tools flat or
nested. All become the messages and tools of chat completions, in which chat templates read them.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coppice.actors.serving.protocol import Refused, shown
from coppice.actors.serving.remembered import Remembered
from coppice.common.dialogue import TOO_DEEP, Message, is_too_deep, text_of

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

LONGEST = 2**31 - 1
"""Stands for every larger number of tokens that a client allows."""


class Asked(msgspec.Struct, frozen=True):
    """One request: the conversation so far, the tools that are offered, and whether one must be
    called (a name: that one).

    allowed: the names of the tools that may be called, all if empty. most: tokens of the reply, 0
    if the client does not say. id: names the request in its session; its response id ends with it.
    stop: strings that end the reply, which ends before them.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    choice: str = "auto"
    allowed: list[str] = []
    most: int = 0
    id: str = ""
    stop: tuple[str, ...] = ()

    @property
    def offered(self) -> list[str]:
        """The names of the tools that may be called."""
        names = [tool["function"]["name"] for tool in self.tools]
        if self.choice in names:
            return [self.choice]
        return (
            []
            if self.choice == "none"
            else [name for name in names if name in (self.allowed or names)]
        )

    @property
    def must_call(self) -> bool:
        """Whether the reply must call a tool."""
        return self.choice not in ("auto", "none")


def chat_of(body: dict[str, Any], shown: Sequence[str] = ()) -> Asked:
    """Read the body of /v1/chat/completions. shown: further fields of a message, texts, that reach
    the template. Raises Refused, which names the field."""
    messages = _messages(body.get("messages"))
    if shown:
        further = [
            {key: m[key] for key in shown if isinstance(m.get(key), str)} for m in body["messages"]
        ]
        messages = [message | more for message, more in zip(messages, further, strict=True)]
    return _asked(body, messages)


def responses_of(
    body: dict[str, Any], remembered: Remembered
) -> tuple[Asked, Callable[[dict[str, Any]], None]]:
    """Read the body of /v1/responses. remembered: what its ids refer to. Also returns what must be
    called with the body of the answer, so that later requests can refer to it. Raises Refused,
    which names the field."""
    for name in ("conversation", "prompt"):
        if body.get(name):
            raise Refused(
                f"`{name}`: {shown(body[name])}: nothing of this name is stored here: send the whole input"
            )
    said = body.get("instructions")
    # not carried over to later requests
    instructions = [_message({"role": "system", "content": said})] if said else []
    messages = _input(body, remembered)
    return _asked(body, [*instructions, *messages]), lambda answer: remembered.note(
        answer, messages
    )


def _asked(body: dict[str, Any], messages: list[Message]) -> Asked:
    tools = _tools(body.get("tools"))
    choice, allowed = _choice(body.get("tool_choice"), tools)
    return Asked(messages, tools, choice, allowed, _most(body))


def body_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises Refused."""
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise Refused(f"the body: {TOO_DEEP}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        surrogate = " (or has a lone surrogate, which is no text)" if SURROGATE.search(raw) else ""
        raise Refused(f"the body is not JSON{surrogate}: {error}") from None
    if not isinstance(body, dict):
        raise Refused(f"the body is {type(body).__name__}, expected a JSON object")
    if is_too_deep(body):
        raise Refused(f"the body: {TOO_DEEP}")
    return body


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Refused("`messages`: expected a list of at least one message")
    return [_message(message) for message in given]


def _message(message: Any) -> Message:
    """Return what of a message reaches the policy."""
    try:
        role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
        kept: Message = {"role": role, "content": text_of(message.get("content"))}
        if role == "tool":
            kept["tool_call_id"] = message.get("tool_call_id") or message.get("name")
        if calls := message.get("tool_calls"):
            kept["tool_calls"] = [
                _call(call.get("id"), call["function"]["name"], call["function"].get("arguments"))
                for call in calls
            ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(f"`messages`: {shown(message)}: {type(error).__name__} {error}") from None
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(
            f"`messages`: role {role!r}: expected system, developer, user, assistant or tool"
        )
    return kept


def _call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    """Return a call of an earlier reply as chat completions write it. Raises ValueError for values
    of other types."""
    if not isinstance(function, str) or not isinstance(arguments, str | dict | None):
        raise ValueError("a tool call: expected a name and arguments as JSON text")
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def _tools(given: Any) -> list[dict[str, Any]]:
    """Return tools in the form of chat completions, in which chat templates read them."""
    tools = []
    if not isinstance(given, list | None):
        raise Refused(f"`tools`: {shown(given)}: expected a list of functions")
    for tool in given or []:
        flat = tool.get("function", tool) if isinstance(tool, dict) else None
        if (
            not isinstance(flat, dict)
            or not isinstance(flat.get("name"), str)
            or not isinstance(flat.get("description"), str | None)
            or not isinstance(flat.get("parameters"), dict | None)
            or tool.get("type") not in (None, "function")
        ):
            raise Refused(
                f"`tools`: {shown(tool)}: expected functions; tools of the provider are not there"
            )
        kept = {
            key: flat[key]
            for key in ("name", "description", "parameters")
            if flat.get(key) is not None
        }
        tools.append({"type": "function", "function": kept})
    return tools


def _choice(given: Any, tools: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return "auto", "none", "required" or the name of the tool that must be called, and the names
    of the allowed tools (empty: all)."""
    names, allowed = [tool["function"]["name"] for tool in tools], list[str]()
    choice = _name(given) or given
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        # nested in chat completions, flat in responses
        subset = given.get("allowed_tools") or given
        listed = subset.get("tools") if isinstance(subset, dict) else None
        allowed = [_name(tool) for tool in listed] if isinstance(listed, list) else []
        choice = subset.get("mode") if allowed and set(allowed) <= set(names) else None
        if choice in ("auto", "required"):
            return choice, allowed
    elif choice in names or (choice == "required" and names) or choice in (None, "auto", "none"):
        return choice or "auto", []
    raise Refused(
        f"`tool_choice`: {shown(given)}: expected auto, none, or with `tools` required, one of {names}, or"
        " allowed_tools of the mode auto or required with some of these names"
    )


def _name(named: Any) -> str:
    """Return the name of a tool that is written flat or nested; "" if there is none."""
    if not isinstance(named, dict):
        return ""
    function = named.get("function")
    name = named.get("name") or (function.get("name") if isinstance(function, dict) else None)
    return name if isinstance(name, str) else ""


def _most(body: dict[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    given = next((body[name] for name in names if body.get(name) is not None), None)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise Refused(f"`max_tokens`: {shown(given)}: expected a positive whole number")
    return min(given or 0, LONGEST)


def _input(body: dict[str, Any], remembered: Remembered) -> list[Message]:
    """Return the conversation of a request to /v1/responses, without its instructions."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused("`input`: expected a text or a list of at least one item")
    messages = list[Message]()
    if previous := body.get("previous_response_id"):
        before, answer = remembered.conversation(previous)
        messages = [*before]
        items = [*answer, *items]
    for item in items:
        _add(item, messages, remembered)
    return messages


def _add(item: Any, messages: list[Message], remembered: Remembered) -> None:
    """Add an item to a conversation. A reply's text and the calls after it are one message, as in
    chat completions."""
    kind = (
        item.get("type") or ("item_reference" if [*item] == ["id"] else "message")
        if isinstance(item, dict)
        else None
    )
    if kind == "item_reference":
        _add(remembered.item(item.get("id")), messages, remembered)
    elif kind == "message":
        messages.append(_message(item))
    elif kind == "function_call":
        last = (
            messages.pop()
            if messages and messages[-1]["role"] == "assistant"
            else {"role": "assistant", "content": ""}
        )
        try:
            call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        except ValueError as error:
            raise Refused(f"`input`: {shown(item)}: {error}") from None
        messages.append({**last, "tool_calls": [*last.get("tool_calls", []), call]})
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append(
            {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": output if isinstance(output, str) else json.dumps(output),
            }
        )
    elif kind != "reasoning":
        raise Refused(
            f"`input`: an item of type {kind!r}: expected message, function_call, function_call_output, item_reference"
            " or reasoning"
        )
