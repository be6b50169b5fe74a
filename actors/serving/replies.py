"""Replies to agents in the words of /v1/chat/completions and /v1/responses, whole or replayed as
server-sent events."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from coppice.actors.environments.base import Spent
from coppice.actors.serving.protocol import Refused
from coppice.common.tool_calls import ToolCall


class Reply(msgspec.Struct, frozen=True):
    """What the policy answered. think: its thought, which clients get beside the reply. stop: the
    stop string that ended it, "" if none did. logprobs: as chat completions write them, None if
    nobody asks. others: further replies to the same request (a chat's ``n``)."""

    text: str
    calls: list[ToolCall] = []
    spent: Spent = Spent()
    think: str = ""
    stop: str = ""
    logprobs: dict[str, Any] | None = None
    others: list["Reply"] = []

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
        """Return the events of a stream. usage: whether the client asks a chat for the counts of
        tokens."""
        raise NotImplementedError

    def refusal(self, refused: Refused) -> bytes:
        """Return the event of a refusal that comes after the status was sent."""
        return sse(refused.body())

    def call_id(self, place: int | str) -> str:
        return f"call_{self.id.rpartition('-')[2]}_{place}"


class ChatForm(Form):
    def __init__(self, model: str):
        super().__init__(model)
        self.id = "chatcmpl-"

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = [self._choice(index, each) for index, each in enumerate([reply, *reply.others])]
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(reply)}

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        chunks: list[dict[str, Any]] = []
        for index, each in enumerate([reply, *reply.others]):
            *deltas, last = self._deltas(index, each)
            chunks += [_chunk(index, delta) for delta in deltas]
            chunks += [
                _chunk(index, last, logprobs=each.logprobs),
                _chunk(index, {}, finish_reason=each.finish),
            ]
        chunks += [{"choices": [], "usage": _usage(reply)}] if usage else []
        return [
            *(sse({**self._head("chat.completion.chunk"), **chunk}) for chunk in chunks),
            b"data: [DONE]\n\n",
        ]

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text or (None if reply.calls else ""),
            "refusal": None,
            **({"reasoning_content": reply.think} if reply.think else {}),
        }
        if reply.calls:
            message["tool_calls"] = self._calls(index, reply)
        return {
            "index": index,
            "message": message,
            "logprobs": reply.logprobs,
            "finish_reason": reply.finish,
        }

    def _deltas(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": reply.think}] if reply.think else []
        deltas += [{"content": reply.text}] if reply.text else []
        return deltas + [
            {"tool_calls": [{"index": i, **call}]}
            for i, call in enumerate(self._calls(index, reply))
        ]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _calls(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        choice = f"{index}_" if index else ""
        return [
            {
                "id": self.call_id(f"{choice}{i}"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(reply.calls)
        ]


class ResponsesForm(Form):
    """note: is told every answer, to which later requests may refer."""

    def __init__(self, model: str, note: Callable[[dict[str, Any]], None]):
        super().__init__(model)
        self.id, self._note = "resp-", note

    def whole(self, reply: Reply) -> dict[str, Any]:
        spent = reply.spent
        usage = {
            "input_tokens": spent.prompt, "input_tokens_details": {"cached_tokens": spent.cached}, "output_tokens": spent.sampled,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": spent.prompt + spent.sampled,
        }  # fmt: skip
        cut = reply.finish == "length"
        body = self._body("incomplete" if cut else "completed", self._items(reply), usage) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None
        }
        self._note(body)
        return body

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        final = self.whole(reply)
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": self._body("in_progress", [], None)}
        ]
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
                    {
                        "type": "response.output_text.delta",
                        **place,
                        "delta": part["text"],
                        "logprobs": [],
                    },
                    {
                        "type": "response.output_text.done",
                        **place,
                        "text": part["text"],
                        "logprobs": [],
                    },
                    {"type": "response.content_part.done", **place, "part": part},
                ]
            else:
                events += [
                    {
                        "type": "response.function_call_arguments.delta",
                        **place,
                        "delta": item["arguments"],
                    },
                    {
                        "type": "response.function_call_arguments.done",
                        **place,
                        "name": item["name"],
                        "arguments": item["arguments"],
                    },
                ]
            events.append(
                {"type": "response.output_item.done", "output_index": index, "item": item}
            )
        events.append({"type": f"response.{final['status']}", "response": final})
        return [
            sse({**event, "sequence_number": i}, event["type"]) for i, event in enumerate(events)
        ]

    def _items(self, reply: Reply) -> list[dict[str, Any]]:
        name, items = self.id.rpartition("-")[2], []
        if reply.text or not reply.calls:
            content = [
                {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            ]
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{name}",
                    "status": "completed",
                    "role": "assistant",
                    "content": content,
                }
            )
        for i, call in enumerate(reply.calls):
            known = {
                "call_id": self.call_id(i),
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            items.append({"type": "function_call", "id": f"fc_{name}_{i}", **known})
        return items

    def _body(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model, "output": output,
            "usage": usage, "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
            "temperature": None, "top_p": None, "tool_choice": "auto", "tools": [],
        }  # fmt: skip


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    return {"content": []} if item["type"] == "message" else {"arguments": ""}


def _chunk(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return what a chunk of one choice says."""
    return {
        "choices": [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        ]
    }


def _usage(reply: Reply) -> dict[str, Any]:
    """Return the counts of tokens. The prompt counts once, whatever the number of replies."""
    spent, sampled = reply.spent, sum(each.spent.sampled for each in [reply, *reply.others])
    return {
        "prompt_tokens": spent.prompt, "completion_tokens": sampled, "total_tokens": spent.prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": spent.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }  # fmt: skip


def sse(value: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event of a name, or without one."""
    return (
        (b"event: " + name.encode() + b"\n" if name else b"")
        + b"data: "
        + msgspec.json.encode(value)
        + b"\n\n"
    )
