"""Replies, and how chats and completions write them, whole or replayed as server-sent events."""

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from coppice.actors.environments.base import Spent
from coppice.actors.serving.protocol import RequestRefused, refusal
from coppice.common.tool_calls import ToolCall
from coppice.wire.faults import Fault

KEEPALIVE_S = 10.0
"""Seconds between comments of a stream that waits, so that no proxy closes it."""
_BROKEN = "\ufffd"
"""The result of decoding an incomplete character."""
_KINDS = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")


class TokenText(msgspec.Struct, frozen=True):
    """One sampled token, decoded alone. top: texts and log-probabilities of the most probable
    tokens, descending."""

    text: str
    logprob: float
    top: list[tuple[str, float]] = []


class Reply(msgspec.Struct, frozen=True):
    """What the policy answered. think: its thought. stop: the stop string that ended it, "" if none
    did. tokens: with their log-probabilities, None if nobody asks. others: further replies to the
    same request (``n``, or several prompts)."""

    text: str
    calls: list[ToolCall] = []
    spent: Spent = Spent()
    think: str = ""
    stop: str = ""
    tokens: list[TokenText] | None = None
    others: list["Reply"] = []

    @property
    def finish(self) -> str:
        """Why the reply ended, as chat completions say it."""
        return "tool_calls" if self.calls else "length" if self.spent.finish == "length" else "stop"


class Form:
    """How one endpoint writes a reply. name: ends the reply's id."""

    prefix, call = "", "call"

    def __init__(self, model: str, name: str):
        self.model, self.name, self.created = model, name, int(time.time())
        self.id = self.prefix + name

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        raise NotImplementedError

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        """Return the events of a stream. usage: whether a chat ends with the counts of tokens."""
        raise NotImplementedError

    def call_id(self, place: int | str) -> str:
        return f"{self.call}_{self.name}_{place}"


class CompletionForm(Form):
    prefix, kind, part = "cmpl-", "text_completion", "text_completion"

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = []
        for index, each in enumerate([reply, *reply.others]):
            head = {"index": index, **self.said(index, each), "logprobs": self.logprobs(each)}
            choices.append({**head, "finish_reason": each.finish})
        sampled = sum(each.spent.sampled for each in [reply, *reply.others])
        prompt = reply.spent.prompt  # counts once, whatever the number of its samples
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": reply.spent.cached, "audio_tokens": 0},
            "completion_tokens_details": {f"{kind}_tokens": 0 for kind in _KINDS},
        }
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, "usage": usage}

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        head: dict[str, Any] = self.whole(reply) | {"object": self.part}
        choices, counts = head.pop("choices"), head.pop("usage")
        chunks = [{"choices": [part]} for choice in choices for part in self.parts(choice)]
        chunks += [{"choices": [], "usage": counts}] if usage else []
        return [*(sse({**head, **chunk}) for chunk in chunks), b"data: [DONE]\n\n"]

    def said(self, index: int, reply: Reply) -> dict[str, Any]:
        """Return what choice ``index`` says."""
        return {"text": reply.text}

    def parts(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of a choice in a stream."""
        return [choice]

    def logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if (tokens := reply.tokens) is None:
            return None
        tops = [_by_text(token) for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(token.top for token in tokens) else None,
        }


class ChatForm(CompletionForm):
    prefix, kind, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def said(self, index: int, reply: Reply) -> dict[str, Any]:
        content = reply.text or (None if reply.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": reply.think} if reply.think else {}
        choice, calls = f"{index}_" if index else "", []
        for i, call in enumerate(reply.calls):
            function = {"name": call.name, "arguments": call.arguments}
            name = self.call_id(f"{choice}{i}")
            calls.append({"id": name, "type": "function", "function": function})
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def parts(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        message, plain = choice["message"], {"logprobs": None, "finish_reason": None}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        said = ("reasoning_content", "content")
        deltas += [{key: message[key]} for key in said if message.get(key)]
        calls = enumerate(message.get("tool_calls", []))
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in calls]
        parts = [{"index": choice["index"], "delta": delta, **plain} for delta in [*deltas, {}]]
        parts[-2] |= {"logprobs": choice["logprobs"]}
        parts[-1] |= {"finish_reason": choice["finish_reason"]}
        return parts

    def logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if reply.tokens is None:
            return None
        content = []
        for token in reply.tokens:
            top = [_entry(text, logprob) for text, logprob in token.top]
            content.append({**_entry(token.text, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # the bytes of a token that is a part of a character are not known here
    spelled = None if _BROKEN in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelled}


def _by_text(token: TokenText) -> dict[str, float]:
    """Return log-probabilities by text. Of equal texts the sampled, then the best counts."""
    logprobs: dict[str, float] = {}
    for text, logprob in token.top:
        logprobs.setdefault(text, logprob)
    return logprobs | {token.text: token.logprob}


def sse(value: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event of a name, or without one."""
    event = b"event: " + name.encode() + b"\n" if name else b""
    return event + b"data: " + msgspec.json.encode(value) + b"\n\n"


async def send(
    request: web.Request, form: Form, answer: asyncio.Future[Reply], stream: bool, usage: bool
) -> web.StreamResponse:
    """Send a reply when it is there: whole, or as a stream that is kept alive until then. A refusal
    has its status unless the stream has begun."""
    if not stream:
        return web.json_response(form.whole(await asyncio.shield(answer)))
    if (await asyncio.wait([answer], timeout=KEEPALIVE_S))[0]:
        answer.result()
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    while not answer.done():
        await response.write(b": waiting\n\n")
        await asyncio.wait([answer], timeout=KEEPALIVE_S)
    try:
        events = form.events(answer.result(), usage)
    except (RequestRefused, Fault) as error:
        body = refusal(error).body(request.path)
        events = [sse(body, body.get("type", ""))]
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response
