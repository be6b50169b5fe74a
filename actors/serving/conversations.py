"""Conversations in the bodies of /v1/chat/completions and /v1/responses. Fields that do not change
what is asked are ignored.

Clients write one conversation in many ways: part lists, null, other names of roles, tools flat or
nested. All become the messages and tools of chat completions, which chat templates read.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coppice.actors.serving.protocol import RequestRefused, shown, unexpected
from coppice.common.dialogue import Message, text_of

LONGEST = 2**31 - 1
"""Stands for every larger number of tokens that a client allows."""


class Conversation(msgspec.Struct, frozen=True):
    """One request: a conversation, the tools offered, and whether one must be called (a name: that
    one). allowed: the tools that may be called, all if empty. most: tokens of the reply, 0 for no
    limit. id: of the request in its session; its response id ends with it. stop: strings before
    which the reply ends."""

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
        if self.choice == "none":
            return []
        return [name for name in names if name in (self.allowed or names)]

    @property
    def must_call(self) -> bool:
        return self.choice not in ("auto", "none")


class ResponseStore:
    """What /v1/responses has answered, for clients that refer to it by ids: items, and
    conversations by the id of their last response. The oldest are dropped. Each session has its
    own, so no episode sees another one's answers."""

    def __init__(self, items: int = 4096, responses: int = 16):
        self._most = items, responses
        self._items: dict[str, dict[str, Any]] = {}
        self._turns: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {}

    def add(self, response: dict[str, Any], before: list[Message]) -> None:
        """Keep an answer's body. before: its conversation without the instructions."""
        self._items |= {item["id"]: item for item in response["output"]}
        self._turns[response["id"]] = before, response["output"]
        for kept, most in zip((self._items, self._turns), self._most, strict=True):
            while len(kept) > most:
                del kept[next(iter(kept))]

    def item(self, name: Any) -> dict[str, Any]:
        """Return the item that has this id. Raises RequestRefused if there is none."""
        if not isinstance(name, str) or name not in self._items:
            wish = "expected the id of an item that was answered here; send the item itself"
            raise RequestRefused(f"`input`: item_reference {shown(name)}: {wish}")
        return self._items[name]

    def conversation(self, name: Any) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return a conversation and the items that ended it. Raises RequestRefused."""
        if not isinstance(name, str) or name not in self._turns:
            wish = f"one of the last {self._most[1]} responses of this server; send the whole input"
            raise unexpected("previous_response_id", name, wish)
        return self._turns[name]

    def clear(self) -> None:
        self._items.clear()
        self._turns.clear()


def listed(body: dict[str, Any], field: str = "messages") -> list[Any]:
    """Return a field that is a list of at least one message or item. Raises RequestRefused."""
    value = body.get(field)
    if not isinstance(value, list) or not value:
        raise unexpected(field, value, "a list of at least one message")
    return value


def chat_of(body: dict[str, Any], texts: Sequence[str] = ()) -> Conversation:
    """Read a body. texts: further fields of a message that reach the template. Raises
    RequestRefused."""
    messages = [
        _message(m) | {key: m[key] for key in texts if isinstance(m.get(key), str)}
        for m in listed(body)
    ]
    return _conversation(body, messages)


def responses_of(
    body: dict[str, Any], store: ResponseStore
) -> tuple[Conversation, Callable[[dict[str, Any]], None]]:
    """Read a body whose ids refer to ``store``. Also return what keeps the answer. Raises
    RequestRefused."""
    for name in ("conversation", "prompt"):
        if body.get(name):
            raise unexpected(name, body[name], "none, as nothing is stored; send the whole input")
    text = body.get("instructions")
    # not carried over to later requests
    instructions = [_message({"role": "system", "content": text})] if text else []
    given, messages = body.get("input"), list[Message]()
    body = (
        body | {"input": [{"role": "user", "content": given}]} if isinstance(given, str) else body
    )
    items = listed(body, "input")
    if previous := body.get("previous_response_id"):
        before, answer = store.conversation(previous)
        messages, items = [*before], [*answer, *items]
    for item in items:
        _add(item, messages, store)
    conversation = _conversation(body, [*instructions, *messages])
    return conversation, lambda answer: store.add(answer, messages)


def _conversation(body: dict[str, Any], messages: list[Message]) -> Conversation:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    most = next((body[name] for name in names if body.get(name) is not None), None)
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise unexpected("max_tokens", most, "a positive whole number")
    tools = _tools(body.get("tools"))
    choice, allowed = _choice(body.get("tool_choice"), tools)
    return Conversation(messages, tools, choice, allowed, min(most or 0, LONGEST))


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
        reason = f"`messages`: {shown(message)}: {type(error).__name__} {error}"
        raise RequestRefused(reason) from None
    if role not in ("system", "user", "assistant", "tool"):
        raise unexpected("role", role, "system, developer, user, assistant or tool")
    return kept


def _call(name: Any, function: Any, arguments: Any) -> dict[str, Any]:
    if not isinstance(function, str) or not isinstance(arguments, str | dict | None):
        raise ValueError("a tool call: expected a name and arguments as JSON text")
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


class _Function(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _tools(given: Any) -> list[dict[str, Any]]:
    """Return tools in the form of chat completions, in which chat templates read them."""
    tools = []
    if not isinstance(given, list | None):
        raise unexpected("tools", given, "a list of functions")
    for tool in given or []:
        try:
            function = msgspec.convert(tool.get("function", tool), _Function)
        except (AttributeError, msgspec.ValidationError):
            function = None
        if function is None or tool.get("type") not in (None, "function"):
            raise unexpected("tools", tool, "functions; tools of the provider are not there")
        tools.append({"type": "function", "function": msgspec.to_builtins(function)})
    return tools


def _choice(given: Any, tools: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return auto, none, required or a tool's name, and the allowed tools (empty: all)."""
    names, allowed = [tool["function"]["name"] for tool in tools], list[str]()
    choice = _name(given) or given
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        # nested in chat completions, flat in responses
        subset = given.get("allowed_tools") or given
        some = subset.get("tools") if isinstance(subset, dict) else None
        allowed = [_name(tool) for tool in some] if isinstance(some, list) else []
        choice = subset.get("mode") if allowed and set(allowed) <= set(names) else None
        if choice in ("auto", "required"):
            return choice, allowed
    elif choice in names or (choice == "required" and names) or choice in (None, "auto", "none"):
        return choice or "auto", []
    wish = (
        f"auto, none, or with `tools` required, one of {names}, or allowed_tools (auto, required)"
    )
    raise unexpected("tool_choice", given, wish)


def _name(named: Any) -> str:
    """Return the name of a tool that is written flat or nested; "" if there is none."""
    if not isinstance(named, dict):
        return ""
    function = named.get("function")
    name = named.get("name") or (function.get("name") if isinstance(function, dict) else None)
    return name if isinstance(name, str) else ""


def _add(item: Any, messages: list[Message], store: ResponseStore) -> None:
    """Add an item of /v1/responses. A reply's text and the calls after it are one message."""
    kind = None
    if isinstance(item, dict):
        kind = item.get("type") or ("item_reference" if [*item] == ["id"] else "message")
    if kind == "item_reference":
        _add(store.item(item.get("id")), messages, store)
    elif kind == "message":
        messages.append(_message(item))
    elif kind == "function_call":
        try:
            call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        except ValueError as error:
            raise RequestRefused(f"`input`: {shown(item)}: {error}") from None
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        last = messages.pop()
        messages.append({**last, "tool_calls": [*last.get("tool_calls", []), call]})
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else json.dumps(output)
        result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        messages.append(result)
    elif kind != "reasoning":
        kinds = "message, function_call, function_call_output, item_reference or reasoning"
        raise unexpected("input", item, f"items of the types {kinds}")
