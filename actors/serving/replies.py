"""Replies to agents in the words of /v1/chat/completions and /v1/responses, whole or replayed as server-sent events."""

import time
from typing import Any

import msgspec

from actors.environments.base import Spent
from wire.tool_calls import ToolCall


class Reply(msgspec.Struct, frozen=True):
    """What the policy answered. think: its thought, which clients get beside the reply."""

    text: str
    calls: list[ToolCall] = []
    spent: Spent = Spent()
    think: str = ""

    @property
    def finish(self) -> str:
        """Why the reply ended, as chat completions say it."""
        return "tool_calls" if self.calls else "length" if self.spent.finish == "length" else "stop"


class Form:
    """How one endpoint writes a reply."""

    def __init__(self, model: str):
        self.model, self.id, self.created = model, "", int(time.time())

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        raise NotImplementedError

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        """Return the events of a stream. usage: whether the client asks a chat for the counts of tokens."""
        raise NotImplementedError

    def call_id(self, place: int) -> str:
        return f"call_{self.id.rpartition('-')[2]}_{place}"


class ChatForm(Form):
    def __init__(self, model: str):
        super().__init__(model)
        self.id = "chatcmpl-"

    def whole(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text or (None if reply.calls else ""),
            "refusal": None,
            **({"reasoning_content": reply.think} if reply.think else {}),
        }
        if reply.calls:
            message["tool_calls"] = self._calls(reply)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": reply.think}] if reply.think else []
        deltas += [{"content": reply.text}] if reply.text else []
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(self._calls(reply))]
        chunks = [
            {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]} for delta in deltas
        ]
        chunks.append({"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.finish}]})
        chunks += [{"choices": [], "usage": _usage(reply)}] if usage else []
        return [*(sse({**self._head("chat.completion.chunk"), **chunk}) for chunk in chunks), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _calls(self, reply: Reply) -> list[dict[str, Any]]:
        return [
            {"id": self.call_id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(reply.calls)
        ]


class ResponsesForm(Form):
    def __init__(self, model: str):
        super().__init__(model)
        self.id = "resp-"

    def whole(self, reply: Reply) -> dict[str, Any]:
        spent = reply.spent
        usage = {
            "input_tokens": spent.prompt, "input_tokens_details": {"cached_tokens": spent.cached}, "output_tokens": spent.sampled,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": spent.prompt + spent.sampled,
        }  # fmt: skip
        cut = reply.finish == "length"
        return self._body("incomplete" if cut else "completed", self._items(reply), usage) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None
        }

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        final = self.whole(reply)
        events: list[dict[str, Any]] = [{"type": "response.created", "response": self._body("in_progress", [], None)}]
        for index, item in enumerate(final["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            events.append(
                {
                    "type": "response.output_item.added",
                    "output_index": index,
                    "item": {**item, "status": "in_progress"} | _emptied(item),
                }
            )
            if item["type"] == "message":
                part, place = item["content"][0], {**place, "content_index": 0}
                events += [
                    {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
                    {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
                    {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
                    {"type": "response.content_part.done", **place, "part": part},
                ]
            else:
                events += [
                    {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]},
                    {
                        "type": "response.function_call_arguments.done",
                        **place,
                        "name": item["name"],
                        "arguments": item["arguments"],
                    },
                ]
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": f"response.{final['status']}", "response": final})
        return [sse({**event, "sequence_number": i}, event["type"]) for i, event in enumerate(events)]

    def _items(self, reply: Reply) -> list[dict[str, Any]]:
        name, items = self.id.rpartition("-")[2], []
        if reply.text or not reply.calls:
            content = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}]
            items.append(
                {"type": "message", "id": f"msg_{name}", "status": "completed", "role": "assistant", "content": content}
            )
        for i, call in enumerate(reply.calls):
            known = {"call_id": self.call_id(i), "name": call.name, "arguments": call.arguments, "status": "completed"}
            items.append({"type": "function_call", "id": f"fc_{name}_{i}", **known})
        return items

    def _body(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model, "output": output,
            "usage": usage, "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
            "temperature": None, "top_p": None, "tool_choice": "auto", "tools": [],
        }  # fmt: skip


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    return {"content": []} if item["type"] == "message" else {"arguments": ""}


def _usage(reply: Reply) -> dict[str, Any]:
    spent = reply.spent
    return {
        "prompt_tokens": spent.prompt, "completion_tokens": spent.sampled, "total_tokens": spent.prompt + spent.sampled,
        "prompt_tokens_details": {"cached_tokens": spent.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }  # fmt: skip


def sse(value: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event of a name, or without one."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + msgspec.json.encode(value) + b"\n\n"
