"""The dialect of /v1/responses: bodies as those of chat completions, and replies in its words."""

import json
from collections.abc import Callable
from typing import Any

from coppice.actors.serving.protocol import listed, unexpected
from coppice.actors.serving.replies import Form, Reply, sse

MOST = 1024
"""Ids of items and responses that a server or a session knows."""
_OWN = (
    "input instructions previous_response_id conversation prompt text max_output_tokens include"
).split()
"""Fields that mean nothing, or something else, in chat completions."""
_ABSENT = dict.fromkeys("error incomplete_details instructions temperature top_p".split())


class ResponseStore:
    """What was answered, for clients that refer to it: the item of an id, and by the id of a
    response all items up to its end. The oldest ids are forgotten. Each session has its own, so no
    episode sees another one's answers."""

    def __init__(self) -> None:
        self._items: dict[str, list[Any]] = {}

    def keep(self, before: list[Any], response: dict[str, Any]) -> None:
        """Keep an answer's body. before: the items that it answers."""
        self._items |= {item["id"]: [item] for item in response["output"]}
        self._items[response["id"]] = [*before, *response["output"]]
        while len(self._items) > MOST:
            del self._items[next(iter(self._items))]

    def items(self, field: str, name: Any) -> list[Any]:
        """Return what has this id. Raises RequestRefused if nothing has."""
        if not isinstance(name, str) or name not in self._items:
            wish = f"one of the last {MOST} ids that were answered here; send the whole input"
            raise unexpected(field, name, wish)
        return self._items[name]


def chat_body(body: dict[str, Any], store: ResponseStore) -> tuple[dict[str, Any], list[Any]]:
    """Return the same request of chat completions, and its items. Raises RequestRefused."""
    for name in ("conversation", "prompt"):
        if body.get(name):
            raise unexpected(name, body[name], "none, as nothing is stored; send the whole input")
    if isinstance(given := body.get("input"), str):
        given = [{"role": "user", "content": given}]
    items = [one for item in listed({"input": given}, "input") for one in _items(item, store)]
    if previous := body.get("previous_response_id"):
        items = [*store.items("previous_response_id", previous), *items]
    text = body.get("instructions")  # not carried over to later requests
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for item in items:
        _add(item, messages)
    chat = {key: value for key, value in body.items() if key not in _OWN}
    most = {"max_tokens": body.get("max_output_tokens"), "response_format": _format(body)}
    return {**chat, **most, "messages": messages}, items


def _items(item: Any, store: ResponseStore) -> list[Any]:
    if isinstance(item, dict) and (item.get("type") == "item_reference" or [*item] == ["id"]):
        return store.items("item_reference", item.get("id"))
    return [item]


def _add(item: Any, messages: list[dict[str, Any]]) -> None:
    """Add an item as a message. A reply's text and the calls after it are one message."""
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        last = messages.pop()
        calls = [*last.get("tool_calls", []), {"id": item.get("call_id"), "function": function}]
        messages.append({**last, "tool_calls": calls})
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str | list) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        kinds = "message, function_call, function_call_output, item_reference or reasoning"
        raise unexpected("input", item, f"items of the types {kinds}")


def _format(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the form of the answer as chat completions name it."""
    text = body.get("text") or {}
    wanted = text.get("format") or {} if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        raise unexpected("text", body["text"], "an object with a `format`")
    if wanted.get("type") != "json_schema":
        return None if wanted.get("type") in (None, "text") else {"type": wanted["type"]}
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


class ResponsesForm(Form):
    """keep: is told every answer, to which later requests may refer."""

    prefix = "resp-"

    def __init__(self, model: str, name: str, keep: Callable[[dict[str, Any]], None]):
        super().__init__(model, name)
        self._keep = keep

    def whole(self, reply: Reply) -> dict[str, Any]:
        spent = reply.spent
        usage = {
            "input_tokens": spent.prompt,
            "input_tokens_details": {"cached_tokens": spent.cached},
            "output_tokens": spent.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": spent.prompt + spent.sampled,
        }
        cut = reply.finish == "length"
        name, items = self.name, []
        if reply.text or not reply.calls:
            part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            head = {"type": "message", "id": f"msg_{name}", "status": "completed"}
            items.append({**head, "role": "assistant", "content": [part]})
        for i, call in enumerate(reply.calls):
            head = {"type": "function_call", "id": f"fc_{name}_{i}", "status": "completed"}
            called = {"name": call.name, "arguments": call.arguments}
            items.append({**head, "call_id": self.call_id(i), **called})
        body = self._body("incomplete" if cut else "completed", items, usage)
        body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self._keep(body)
        return body

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        final, events = self.whole(reply), list[dict[str, Any]]()

        def add(kind: str, **fields: Any) -> None:
            events.append({"type": f"response.{kind}", "sequence_number": len(events), **fields})

        add("created", response=self._body("in_progress", [], None))
        for index, item in enumerate(final["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
            begun = {**item, "status": "in_progress", **empty}
            add("output_item.added", output_index=index, item=begun)
            if item["type"] == "message":
                part, place = item["content"][0], {**place, "content_index": 0}
                add("content_part.added", **place, part={**part, "text": ""})
                add("output_text.delta", **place, delta=part["text"], logprobs=[])
                add("output_text.done", **place, text=part["text"], logprobs=[])
                add("content_part.done", **place, part=part)
            else:
                name, arguments = item["name"], item["arguments"]
                add("function_call_arguments.delta", **place, delta=arguments)
                add("function_call_arguments.done", **place, name=name, arguments=arguments)
            add("output_item.done", output_index=index, item=item)
        add(final["status"], response=final)
        return [sse(event, event["type"]) for event in events]

    def _body(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        rest = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {**head, "model": self.model, "output": output, "usage": usage, **rest, **_ABSENT}
