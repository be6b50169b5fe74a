"""The door through which agents speak with the policy: a server of OpenAI's and Anthropic's protocols whose every key is the session of one episode.

A request waits in its session until the episode answers it. Nothing here knows the policy: what an agent sends becomes ``Asked``, and what is
answered comes as ``Reply``. Any model name is the policy's, and the client's sampling settings are left to the run, whose settings the learner knows. A
reply is generated whole and then, if a stream is asked for, replayed as server-sent events.
"""

import asyncio
import collections
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from actors.serving import anthropic
from actors.serving.asked import Asked, body_of, chat_of, responses_of
from actors.serving.protocol import Refused
from actors.serving.remembered import Remembered
from actors.serving.replies import ChatForm, Form, Reply, ResponsesForm
from wire.messages import Passage

LARGEST_BODY = 16 << 20
"""The most bytes of a request; histories come whole with every call."""
KEEPALIVE_S = 10.0
"""Seconds between two comments of a stream whose reply is not there yet, so that no proxy closes it."""
REMEMBERED = 4
"""Requests of a session whose answers are kept for a client that asks again."""


class Session:
    """The episode that belongs to a key: its requests in the order in which they came. reward: of the episode, None if nobody gave one. open: the
    request whose reply can be rewarded: the last one that was answered, until the next one is taken. retrieve: asks the run's retriever for a query and a
    number of passages; None where there is none. count: tells how many tokens a request's prompt has; None where nobody can. remembered: what
    /v1/responses has answered."""

    def __init__(self, key: str):
        self.key = key
        self.requests: asyncio.Queue[tuple[Asked, asyncio.Future[Reply]]] = asyncio.Queue()
        self.reward: float | None = None
        self.step_reward: float | None = None
        self.open = ""
        self.closed = ""
        self.retrieve: Callable[[str, int], Awaitable[list[Passage]]] | None = None
        self.count: Callable[[Asked], int] | None = None
        self.remembered = Remembered()
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
        self.remembered.clear()
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
            app.router.add_post(f"{prefix}/v1/messages", self._messages)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{name:.+}}", self._models)
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
        headers = (request.headers.get(name) for name in ("X-Api-Key", "X-Session-ID"))
        for key in (request.match_info.get("key"), bearer, *headers):
            if key in self.sessions:
                return self.sessions[key]
        raise Refused(
            "unknown key: expected the key of an episode as a bearer token, as x-api-key, in the path (/s/KEY/v1) or as"
            " X-Session-ID",
            401,
        )

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info.get("name")
        model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "coppice"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), body_of(await request.read())
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
        session, body = self._session(request), body_of(await request.read())
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
        body = body_of(await request.read())
        return await self._answer(request, body, chat_of(body), ChatForm(str(body.get("model") or "policy")))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = body_of(await request.read())
        asked, note = responses_of(body, self._session(request).remembered)
        return await self._answer(request, body, asked, ResponsesForm(str(body.get("model") or "policy"), note))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = body_of(await request.read())
        chat = anthropic.chat_body(body)
        return await self._answer(request, chat, chat_of(chat), anthropic.MessagesForm(body, "policy"))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, body = self._session(request), body_of(await request.read())
        if session.count is None:
            raise Refused("nobody here can count the tokens of a request", 404)
        try:
            return web.json_response({"input_tokens": session.count(chat_of(anthropic.chat_body(body, counted=True)))})
        except ValueError as error:  # of the chat template
            raise Refused(str(error)) from None

    async def _answer(self, request: web.Request, body: dict[str, Any], asked: Asked, form: Form) -> web.StreamResponse:
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
            for chunk in form.events(answer.result(), bool((body.get("stream_options") or {}).get("include_usage"))):
                await response.write(chunk)
        except Refused as refused:  # the status is sent already
            await response.write(form.refusal(refused))
        await response.write_eof()
        return response


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return web.json_response(anthropic.refusal(request.path, refused), status=refused.status)
