"""Anthropic's dialect, /v1/messages: its bodies as those of chat completions, and replies in its
words. Earlier thoughts are left out of a history; images and documents are refused."""

import json
import re
from typing import Any

from coppice.actors.serving.protocol import UNTHREADED, RequestRefused, listed, unexpected
from coppice.actors.serving.replies import Form, Reply, sse
from coppice.common.dialogue import text_of

_TRANSLATED = """
    messages system tools tool_choice stop_sequences output_config output_format stop
    response_format n logprobs top_logprobs functions
""".split()
"""Fields that are written anew, and those of chat completions that this dialect does not have."""
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code begins its system prompt with this line, which differs in every request."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: dict[str, Any], counted: bool = False) -> dict[str, Any]:
    """Return the same request of chat completions. counted: only its tokens. Raises
    RequestRefused."""
    messages = [message for each in listed(body) for message in _messages(each)]
    if messages[-1]["role"] == "assistant" and not counted:
        raise unexpected("messages", messages[-1], "a user's last: a reply cannot be continued")
    if servers := body.get("mcp_servers"):
        raise unexpected("mcp_servers", servers, "none: the provider's tools are absent")
    if body.get("thread"):
        reason = "`thread`: no conversation is held here: send the whole one without it"
        raise RequestRefused(reason, code=UNTHREADED)
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise unexpected("tools", tools, "a list")
    fields = {
        "messages": [*_system(body.get("system")), *messages],
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": _choice(body.get("tool_choice")),
        "stop": body.get("stop_sequences") or None,
        "response_format": _format(body),
    }
    rest = {key: value for key, value in body.items() if key not in _TRANSLATED}
    return rest | {key: value for key, value in fields.items() if value is not None}


def _system(system: Any) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    try:
        text = "".join(_BILLING.sub("", text_of([block])) for block in blocks)
    except (TypeError, ValueError):
        raise unexpected("system", system, "a text or a list of text blocks") from None
    return [{"role": "system", "content": text}] if text else []


def _messages(message: Any) -> list[dict[str, Any]]:
    """Return a message as chat completions have it, with each tool result on its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant"):
        raise unexpected("messages", message, "an object with the role user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise unexpected("content", content, "a text or a list of blocks")
    results, texts, calls = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            results += [{"role": role, "content": texts}] if texts else []
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            results.append({**result, "content": _result(block)})
            texts = []
        elif kind not in ("thinking", "redacted_thinking"):
            wish = "text, a user's tool_result, or an assistant's tool_use or thinking"
            raise unexpected(f"a block from the {role}", block, wish)
    said = {"role": role, "content": texts, **({"tool_calls": calls} if calls else {})}
    return [*results, said] if texts or not results else results


def _call(block: dict[str, Any]) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise unexpected("messages", block, "a tool_use with a `name` and an object as `input`")
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: dict[str, Any]) -> str:
    try:
        text = text_of(block.get("content"))
    except ValueError:
        raise unexpected("tool_result", block, "a text or a list of text blocks") from None
    return f"Error: {text}" if block.get("is_error") else text


def _tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else ""
    if kind not in (None, "custom") or not isinstance(tool.get("input_schema"), dict):
        raise unexpected("tools", tool, "an `input_schema`; tools of the provider are not there")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and not (isinstance(kind, str) and kind in _CHOICES):
        raise unexpected("tool_choice", choice, "the type auto, any, none, or tool with a `name`")
    return _CHOICES.get(kind or "auto")


def _format(body: dict[str, Any]) -> dict[str, Any] | None:
    config = body.get("output_config")
    config = config if isinstance(config, dict) else {}
    if not (wanted := body.get("output_format") or config.get("format")):
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise unexpected("output_config", wanted, "the type json_schema with a `schema`")
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


class MessagesForm(Form):
    """thinks: whether the client asks for the thought, as a block before the text."""

    prefix, call = "msg-", "toolu"

    def __init__(self, model: str, name: str, thinking: Any = None):
        super().__init__(model, name)
        self.thinks = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")

    def whole(self, reply: Reply) -> dict[str, Any]:
        return self._message(self._content(reply), _usage(reply)) | self._end(reply)

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        events = list[bytes]()

        def add(kind: str, **fields: Any) -> None:
            events.append(sse({"type": kind, **fields}, kind))

        add("message_start", message=self._message([], {**_usage(reply), "output_tokens": 0}))
        add("ping")
        for index, block in enumerate(self._content(reply)):
            deltas, empty = _deltas(block)
            add("content_block_start", index=index, content_block={**block, **empty})
            for delta in deltas:
                add("content_block_delta", index=index, delta=delta)
            add("content_block_stop", index=index)
        add("message_delta", delta=self._end(reply), usage=_usage(reply))
        add("message_stop")
        return events

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        end = {"stop_reason": None, "stop_sequence": None}
        return {**head, "content": content, **end, "usage": usage}

    def _content(self, reply: Reply) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if reply.think and self.thinks:
            blocks.append({"type": "thinking", "thinking": reply.think, "signature": ""})
        if reply.text or not reply.calls:
            blocks.append({"type": "text", "text": reply.text})
        for place, call in enumerate(reply.calls):
            # NaN and Infinity are no JSON
            arguments = json.loads(call.arguments, parse_constant=lambda _: None)
            head = {"type": "tool_use", "id": self.call_id(place)}
            blocks.append({**head, "name": call.name, "input": arguments})
        return blocks

    def _end(self, reply: Reply) -> dict[str, Any]:
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reply.finish)
        return {
            "stop_reason": reason or ("stop_sequence" if reply.stop else "end_turn"),
            "stop_sequence": None if reason else reply.stop or None,
        }


def _deltas(block: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the deltas of a block, and the fields in which it begins empty."""
    kind = block["type"]
    if kind == "tool_use":
        written = json.dumps(block["input"])
        return [{"type": "input_json_delta", "partial_json": written}], {"input": {}}
    deltas = [{"type": f"{kind}_delta", kind: block[kind]}]
    deltas += [{"type": "signature_delta", "signature": ""}] if kind == "thinking" else []
    return deltas, {kind: ""}


def _usage(reply: Reply) -> dict[str, int]:
    spent = reply.spent
    return {
        "input_tokens": spent.prompt - spent.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": spent.cached,
        "output_tokens": spent.sampled,
    }
