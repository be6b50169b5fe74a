"""Replies in the words of /v1/chat/completions and /v1/responses, whole or replayed as server-sent
events."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from coppice.actors.environments.base import Spent
from coppice.actors.serving.protocol import sse
from coppice.common.tool_calls import ToolCall


class Reply(msgspec.Struct, frozen=True):
    """What the policy answered. think: its thought. stop: the stop string that ended it, "" if none
    did. logprobs: as chat completions write them, None if nobody asks. others: further replies to
    the same request (a chat's ``n``)."""

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


_ABSENT = dict.fromkeys("error incomplete_details instructions temperature top_p".split())
_KINDS = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")


class Form:
    """How one endpoint writes a reply. id: begins the ids of its replies."""

    id, call = "", "call"

    def __init__(self, model: str):
        self.model, self.created = model, int(time.time())

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        raise NotImplementedError

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        """Return the events of a stream. usage: whether a chat ends with the counts of tokens."""
        raise NotImplementedError

    def call_id(self, place: int | str) -> str:
        return f"{self.call}_{self.id.rpartition('-')[2]}_{place}"


class ChatForm(Form):
    id = "chatcmpl-"

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = []
        for index, each in enumerate([reply, *reply.others]):
            content = each.text or (None if each.calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            message |= {"reasoning_content": each.think} if each.think else {}
            message |= {"tool_calls": self._calls(index, each)} if each.calls else {}
            choice = {"index": index, "message": message, "logprobs": each.logprobs}
            choices.append(choice | {"finish_reason": each.finish})
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(reply)}

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        chunks: list[dict[str, Any]] = []
        for index, each in enumerate([reply, *reply.others]):
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            deltas += [{"reasoning_content": each.think}] if each.think else []
            deltas += [{"content": each.text}] if each.text else []
            calls = self._calls(index, each)
            deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
            chunks += [_chunk(index, delta) for delta in deltas[:-1]]
            chunks.append(_chunk(index, deltas[-1], logprobs=each.logprobs))
            chunks.append(_chunk(index, {}, finish_reason=each.finish))
        chunks += [{"choices": [], "usage": _usage(reply)}] if usage else []
        head = self._head("chat.completion.chunk")
        return [*(sse({**head, **chunk}) for chunk in chunks), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _calls(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        choice, calls = f"{index}_" if index else "", []
        for i, call in enumerate(reply.calls):
            function = {"name": call.name, "arguments": call.arguments}
            name = self.call_id(f"{choice}{i}")
            calls.append({"id": name, "type": "function", "function": function})
        return calls


class ResponsesForm(Form):
    """keep: is told every answer, to which later requests may refer."""

    id = "resp-"

    def __init__(self, model: str, keep: Callable[[dict[str, Any]], None]):
        super().__init__(model)
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
        name, items = self.id.rpartition("-")[2], []
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


def _chunk(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
    return {"choices": [choice]}


def usage(prompt: int, cached: int, sampled: int) -> dict[str, Any]:
    """Return the counts of tokens. A prompt counts once, whatever the number of its samples."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {f"{kind}_tokens": 0 for kind in _KINDS},
    }


def _usage(reply: Reply) -> dict[str, Any]:
    sampled = sum(each.spent.sampled for each in [reply, *reply.others])
    return usage(reply.spent.prompt, reply.spent.cached, sampled)
