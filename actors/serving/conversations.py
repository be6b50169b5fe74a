"""One form for the requests of all dialects: each becomes a body of chat completions, and that a
conversation. Fields that do not change what is asked are ignored.

Clients write one conversation in many ways: part lists, null, other names of roles, tools flat or
nested. All become the messages and tools of chat completions, which chat templates read.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from coppice.actors.serving import anthropic, responses
from coppice.actors.serving.protocol import RequestRefused, listed, shown, unexpected
from coppice.actors.serving.replies import ChatForm, Form
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


def translated(
    path: str, body: dict[str, Any], store: responses.ResponseStore
) -> tuple[dict[str, Any], Callable[[str, str], Form]]:
    """Return a body as chat completions have it, and the form of its reply. path: of the request.
    store: what the ids in a body of /v1/responses refer to. Raises RequestRefused."""
    if path.endswith("/responses"):
        body, items = responses.chat_body(body, store)
        return body, partial(responses.ResponsesForm, keep=partial(store.keep, items))
    if "/messages" in path:
        chat = anthropic.chat_body(body, counted=path.endswith("/count_tokens"))
        return chat, partial(anthropic.MessagesForm, thinking=body.get("thinking"))
    return body, ChatForm


def chat_of(body: dict[str, Any], texts: Sequence[str] = ()) -> Conversation:
    """Read a body of chat completions. texts: further fields of a message that reach the template.
    Raises RequestRefused."""
    messages = [
        _message(m) | {key: m[key] for key in texts if isinstance(m.get(key), str)}
        for m in listed(body)
    ]
    names = ("max_completion_tokens", "max_tokens")
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
            pairs = ((call.get("id"), call["function"]) for call in calls)
            kept["tool_calls"] = [_call(key, f["name"], f.get("arguments")) for key, f in pairs]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"a message, {shown(message)}: {type(error).__name__} {error}"
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
    with_tools = f"required, one of {names}, or allowed_tools (auto, required)"
    raise unexpected("tool_choice", given, f"auto, none, or with `tools` {with_tools}")


def _name(named: Any) -> str:
    """Return the name of a tool that is written flat or nested; "" if there is none."""
    if not isinstance(named, dict):
        return ""
    function = named.get("function")
    name = named.get("name") or (function.get("name") if isinstance(function, dict) else None)
    return name if isinstance(name, str) else ""
