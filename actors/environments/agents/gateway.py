"""The door through which agents speak with the policy: an OpenAI-compatible server whose every key is the session of one episode.

A request waits in its session until the episode answers it. Nothing here knows the policy: what an agent sends becomes ``Asked``, and what is
answered comes as ``Reply``. Fields that do not change what is asked are ignored, any model name is the policy's, and the client's sampling settings are
left to the run, whose settings the learner knows. A reply is generated whole and then, if a stream is asked for, replayed as server-sent events.
"""

import asyncio
import collections
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from actors.environments.base import Spent
from wire.dialogue import Message, text_of
from wire.messages import Passage
from wire.tool_calls import ToolCall

LARGEST_BODY = 16 << 20
"""The most bytes of a request; histories come whole with every call."""
KEEPALIVE_S = 10.0
"""Seconds between two comments of a stream whose reply is not there yet, so that no proxy closes it."""
REMEMBERED = 4
"""Requests of a session whose answers are kept for a client that asks again."""


class Asked(msgspec.Struct, frozen=True):
    """One request: the conversation so far, the tools that are offered, and whether one must be called (a name: that one). most: tokens of the reply,
    0 if the client does not say. id: names the request in its session; its response id ends with it."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    choice: str = "auto"
    most: int = 0
    id: str = ""

    @property
    def offered(self) -> list[str]:
        """The names of the tools that may be called."""
        names = [tool["function"]["name"] for tool in self.tools]
        return [] if self.choice == "none" else [self.choice] if self.choice in names else names

    @property
    def must_call(self) -> bool:
        """Whether the reply must call a tool."""
        return self.choice not in ("auto", "none")


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


class Refused(Exception):
    """A request that cannot be answered. It is told as OpenAI's API tells errors."""

    def __init__(self, reason: str, status: int = 400):
        super().__init__(reason)
        self.status = status


class Session:
    """The episode that belongs to a key: its requests in the order in which they came. reward: of the episode, None if nobody gave one. open: the
    request whose reply can be rewarded: the last one that was answered, until the next one is taken. retrieve: asks the run's retriever for a query and a
    number of passages; None where there is none."""

    def __init__(self, key: str):
        self.key = key
        self.requests: asyncio.Queue[tuple[Asked, asyncio.Future[Reply]]] = asyncio.Queue()
        self.reward: float | None = None
        self.step_reward: float | None = None
        self.open = ""
        self.closed = ""
        self.retrieve: Callable[[str, int], Awaitable[list[Passage]]] | None = None
        self._asked: collections.Counter[str] = collections.Counter()
        self._answers: dict[str, asyncio.Future[Reply]] = {}
        self._waiting: set[asyncio.Future[Reply]] = set()

    def ask(self, asked: Asked, digest: str, again: bool) -> tuple[str, asyncio.Future[Reply]]:
        """Put a request into the queue, and return its id and its future answer. digest: of its body. again: the client says that it repeats a request,
        whose answer it then gets."""
        if self.closed:
            raise Refused(f"this episode is over: {self.closed}", 409)
        if again and (last := f"{digest}{self._asked[digest]}") in self._answers:
            return last, self._answers[last]
        self._asked[digest] += 1
        asked = msgspec.structs.replace(asked, id=f"{digest}{self._asked[digest]}")
        answer = self._answers[asked.id] = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        answer.add_done_callback(self._waiting.discard)
        while len(self._answers) > REMEMBERED:
            del self._answers[next(iter(self._answers))]
        self.requests.put_nowait((asked, answer))
        return asked.id, answer

    def give(self, reward: float, response_id: str) -> None:
        """Note a reward: of the episode, or of the reply that has this id. Raises Refused if that reply's turn is recorded already."""
        if not response_id:
            self.reward = reward
        elif self.open and response_id.endswith(f"-{self.open}"):
            self.step_reward = reward
        else:
            raise Refused(
                f"`response_id`: {response_id[:80]!r}: expected the reply that was given last, before anything else is asked and the episode ends",
                409,
            )

    def close(self, reason: str) -> None:
        """Refuse further requests, and those that wait. Of a closed session only the reason is kept."""
        self.closed, self.open = reason, ""
        self._asked.clear()
        self._answers.clear()
        for answer in list(self._waiting):
            answer.set_exception(Refused(f"this episode is over: {reason}", 409))
            answer.exception()  # nobody may be waiting for it any more


class Gateway:
    """Serves from ``start`` to ``close``. ``opened`` makes a session; ``url`` is where its key is taken."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self.host, self.port = host, port
        self.sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the place is taken."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_errors])
        for prefix in ("", "/s/{key}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/responses", self._responses)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/episode/reward", self._reward)
            app.router.add_post(f"{prefix}/v1/retrieve", self._retrieve)
        self._runner = web.AppRunner(
            app, handler_cancellation=False, shutdown_timeout=1.0, access_log=None
        )  # an answer that nobody takes is still the episode's
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """The base URL of clients."""
        return f"http://{self.host}:{self.port}/v1"

    async def close(self) -> None:
        """Close all sessions and stop listening."""
        for session in self.sessions.values():
            session.close("the gateway has ended")
        if self._runner is not None:
            await self._runner.cleanup()

    def opened(self) -> Session:
        """Return a new session."""
        session = Session(f"ck-{secrets.token_urlsafe(24)}")
        self.sessions[session.key] = session
        return session

    def end(self, session: Session, reason: str) -> None:
        """Close a session. Its key stays known, so that a late call is told why."""
        session.close(reason)

    # ------------------------------------------------------------------------------------------ routes

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for key in (request.match_info.get("key"), bearer, request.headers.get("X-Session-ID")):
            if key in self.sessions:
                return self.sessions[key]
        raise Refused(
            "unknown key: expected the key of an episode as a bearer token, in the path (/s/KEY/v1) or as X-Session-ID",
            401,
        )

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "coppice"}]}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _body(request)
        reward = body.get("reward")
        if (
            isinstance(reward, bool)
            or not isinstance(reward, int | float)
            or reward != reward
            or abs(reward) == float("inf")
        ):
            raise Refused(f"`reward`: {reward!r}: expected a finite number; leave the call out if there is none")
        session.give(float(reward), str(body.get("response_id") or ""))
        return web.json_response({"status": "ok"})

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Search-R1's protocol, as of ``judges.retriever.http_server``."""
        session, body = self._session(request), await _body(request)
        queries, topk = body.get("queries"), body.get("topk", 3)
        if session.retrieve is None:
            raise Refused("this run has no retriever: set data.options.retriever = true", 404)
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries) or not queries:
            raise Refused("`queries`: expected a list of at least one text")
        if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
            raise Refused(f"`topk`: {topk!r}: expected a positive whole number")
        found = [await session.retrieve(query, topk) for query in queries]
        rows = [[{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in row] for row in found]
        return web.json_response({"result": rows})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        tools = _tools(body.get("tools"))
        asked = Asked(_messages(body.get("messages")), tools, _choice(body.get("tool_choice"), tools), _most(body))
        return await self._answer(request, body, asked, _Chat(str(body.get("model") or "policy")))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if body.get("previous_response_id"):
            raise Refused("`previous_response_id`: nothing is stored between calls: send the whole input")
        tools = _tools(body.get("tools"))
        asked = Asked(_input(body), tools, _choice(body.get("tool_choice"), tools), _most(body))
        return await self._answer(request, body, asked, _Responses(str(body.get("model") or "policy")))

    async def _answer(
        self, request: web.Request, body: dict[str, Any], asked: Asked, form: "_Form"
    ) -> web.StreamResponse:
        if body.get("n") not in (None, 1):
            raise Refused(
                f"`n`: {body['n']!r}: expected 1; candidates are the run's own (scheduler.strategy_options.k)"
            )
        digest = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=8).hexdigest()
        again = (
            request.headers.get("x-stainless-retry-count", "0") not in ("", "0") or "Idempotency-Key" in request.headers
        )
        name, answer = self._session(request).ask(asked, digest, again)
        form.id += name
        if not body.get("stream"):
            return web.json_response(form.whole(await asyncio.shield(answer)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not answer.done():
            await asyncio.wait([answer], timeout=KEEPALIVE_S)
            if not answer.done():
                await response.write(b": waiting\n\n")
        try:
            for event in form.events(answer.result(), bool((body.get("stream_options") or {}).get("include_usage"))):
                await response.write(event)
        except Refused as refused:  # the status is sent already
            await response.write(_event(_error(refused)))
        await response.write_eof()
        return response


# ---------------------------------------------------------------------------------------------- what is asked


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
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
                {
                    "id": call.get("id"),
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": call["function"].get("arguments")},
                }
                for call in calls
            ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(f"`messages`: {str(message)[:80]}: {type(error).__name__} {error}") from None
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(f"`messages`: role {role!r}: expected system, developer, user, assistant or tool")
    return kept


def _tools(given: Any) -> list[dict[str, Any]]:
    """Return tools in the form of chat completions, in which chat templates read them."""
    tools = []
    for tool in given or []:
        flat = tool if isinstance(tool, dict) and "function" not in tool else (tool or {}).get("function")
        if (
            not isinstance(flat, dict)
            or not isinstance(flat.get("name"), str)
            or tool.get("type") not in (None, "function")
        ):
            raise Refused(f"`tools`: {str(tool)[:80]}: expected functions; tools of the provider are not there")
        kept = {key: flat[key] for key in ("name", "description", "parameters") if flat.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def _choice(given: Any, tools: list[dict[str, Any]]) -> str:
    """Return "auto", "none", "required" or the name of the tool that must be called."""
    names = [tool["function"]["name"] for tool in tools]
    name = given.get("name") or (given.get("function") or {}).get("name") if isinstance(given, dict) else None
    if isinstance(name, str) and name in names:
        return name
    if given not in (None, "auto", "none", "required") or (given == "required" and not names):
        raise Refused(
            f"`tool_choice`: {str(given)[:80]}: expected auto, none, or with `tools` required or one of {names}"
        )
    return given or "auto"


def _most(body: dict[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    given = next((body[name] for name in names if body.get(name) is not None), None)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise Refused(f"`max_tokens`: {given!r}: expected a positive whole number")
    return given or 0


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
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
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


# ---------------------------------------------------------------------------------------------- what is answered


class _Form:
    """How one endpoint writes a reply."""

    def __init__(self, model: str):
        self.model, self.id, self.created = model, "", int(time.time())

    def whole(self, reply: Reply) -> dict[str, Any]:
        raise NotImplementedError

    def events(self, reply: Reply, usage: bool) -> list[bytes]:
        raise NotImplementedError

    def call_id(self, place: int) -> str:
        return f"call_{self.id.rpartition('-')[2]}_{place}"


class _Chat(_Form):
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
        return [*(_event({**self._head("chat.completion.chunk"), **chunk}) for chunk in chunks), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _calls(self, reply: Reply) -> list[dict[str, Any]]:
        return [
            {"id": self.call_id(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(reply.calls)
        ]


class _Responses(_Form):
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
        return [_event({**event, "sequence_number": i}, event["type"]) for i, event in enumerate(events)]

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
            "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [],
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


def _event(value: dict[str, Any], name: str = "") -> bytes:
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error(refused: Refused) -> dict[str, Any]:
    return {"error": {"message": str(refused), "type": "invalid_request_error", "param": None, "code": None}}


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return web.json_response(_error(refused), status=refused.status)
