"""What agents and their libraries ask, read from the bodies of /v1/chat/completions and /v1/responses. Fields that do not change what is asked are ignored.

Clients write one conversation in many ways: part lists, null, other names of roles, tools flat or nested. All become the messages and tools of chat
completions, in which chat templates read them.
"""

import json
from typing import Any

import msgspec

from actors.serving.protocol import Refused, shown
from wire.dialogue import Message, text_of

LONGEST = 2**31 - 1
"""Stands for every larger number of tokens that a client allows."""


class Asked(msgspec.Struct, frozen=True):
    """One request: the conversation so far, the tools that are offered, and whether one must be called (a name: that one). most: tokens of the reply,
    0 if the client does not say. id: names the request in its session; its response id ends with it. stop: strings that end the reply, which
    ends before them."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    choice: str = "auto"
    most: int = 0
    id: str = ""
    stop: tuple[str, ...] = ()

    @property
    def offered(self) -> list[str]:
        """The names of the tools that may be called."""
        names = [tool["function"]["name"] for tool in self.tools]
        return [] if self.choice == "none" else [self.choice] if self.choice in names else names

    @property
    def must_call(self) -> bool:
        """Whether the reply must call a tool."""
        return self.choice not in ("auto", "none")


def chat_of(body: dict[str, Any]) -> Asked:
    """Read the body of /v1/chat/completions. Raises Refused, which names the field."""
    tools = _tools(body.get("tools"))
    return Asked(_messages(body.get("messages")), tools, _choice(body.get("tool_choice"), tools), _most(body))


def responses_of(body: dict[str, Any]) -> Asked:
    """Read the body of /v1/responses. Raises Refused, which names the field."""
    if body.get("previous_response_id"):
        raise Refused("`previous_response_id`: nothing is stored between calls: send the whole input")
    tools = _tools(body.get("tools"))
    return Asked(_input(body), tools, _choice(body.get("tool_choice"), tools), _most(body))


def body_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises Refused."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body: expected a JSON object")
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
                _call(call.get("id"), call["function"]["name"], call["function"].get("arguments")) for call in calls
            ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(f"`messages`: {shown(message)}: {type(error).__name__} {error}") from None
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(f"`messages`: role {role!r}: expected system, developer, user, assistant or tool")
    return kept


def _call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    """Return a call of an earlier reply as chat completions write it. Raises ValueError for values of other types."""
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
            raise Refused(f"`tools`: {shown(tool)}: expected functions; tools of the provider are not there")
        kept = {key: flat[key] for key in ("name", "description", "parameters") if flat.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def _choice(given: Any, tools: list[dict[str, Any]]) -> str:
    """Return "auto", "none", "required" or the name of the tool that must be called."""
    names = [tool["function"]["name"] for tool in tools]
    function = given.get("function", given) if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and name in names:
        return name
    if given not in (None, "auto", "none", "required") or (given == "required" and not names):
        raise Refused(f"`tool_choice`: {shown(given)}: expected auto, none, or with `tools` required or one of {names}")
    return given or "auto"


def _most(body: dict[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    given = next((body[name] for name in names if body.get(name) is not None), None)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise Refused(f"`max_tokens`: {shown(given)}: expected a positive whole number")
    return min(given or 0, LONGEST)


def _input(body: dict[str, Any]) -> list[Message]:
    """Return the conversation of a request to /v1/responses. A reply's text and the calls after it are one message, as in chat completions."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused("`input`: expected a text or a list of at least one item")
    messages = [_message({"role": "system", "content": body["instructions"]})] if body.get("instructions") else []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(_message(item))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            try:
                call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
            except ValueError as error:
                raise Refused(f"`input`: {shown(item)}: {error}") from None
            messages[-1].setdefault("tool_calls", []).append(call)
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
                f"`input`: an item of type {kind!r}: expected message, function_call, function_call_output or reasoning"
            )
    return messages
