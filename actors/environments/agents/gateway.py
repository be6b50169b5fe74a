"""The door through which agents speak with the policy: a server of OpenAI's and Anthropic's
protocols whose every key is the session of one episode.

A request waits in its session until the episode answers it. Nothing here knows the policy: what an
agent sends becomes ``Asked``, and what is answered comes as ``Reply``. Any model name is the
policy's, and the client's sampling settings are left to the run, whose settings the learner knows.
A reply is generated whole and then, if a stream is asked for, replayed as server-sent events.
"""

import asyncio
import collections
import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from coppice.actors.serving import anthropic
from coppice.actors.serving.asked import Asked, body_of, chat_of, responses_of
from coppice.actors.serving.protocol import Refused, http_refused, shown
from coppice.actors.serving.remembered import Remembered
from coppice.actors.serving.replies import ChatForm, Form, Reply, ResponsesForm
from coppice.wire.faults import Fault, InfrastructureFault
from coppice.wire.messages import Passage

LARGEST_BODY = 16 << 20
"""The most bytes of a request; histories come whole with every call."""
KEEPALIVE_S = 10.0
"""Seconds between two comments of a stream whose reply is not there yet, so that no proxy closes
it."""
REMEMBERED = 4
"""Answered requests of a session that are kept for a client that asks again. A request that waits
is always kept."""
CLOSED = 10_000
"""Ended sessions whose keys are kept, with their reasons, so that a late call is told why it is
refused."""
MOST_STOPS = 16
"""The most stop strings of one request."""
MOST_PASSAGES = 1_000
"""The most passages of one query that an agent may ask for."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Fields that would change a reply and are not honoured, with their values that have no effect."""
_REMEDIES = {
    "n": "candidates are the run's own (scheduler.strategy_options.k)",
    "response_format": "the policy is trained as it samples, without a grammar: say in the prompt what you want, or offer a tool",
    "logprobs": "log-probabilities stand in the tree (coppice trees)",
    "top_logprobs": "log-probabilities stand in the tree (coppice trees)",
    "functions": "they are called `tools` now",
    "function_call": "it is called `tool_choice` now",
}


class Session:
    """The episode that belongs to a key: its requests in the order in which they came. reward: of
    the episode, None if nobody gave one. open: the request whose reply can be rewarded: the last
    one that was answered, until the next one is taken. retrieve: asks the run's retriever for a
    query and a number of passages; None where there is none. count: tells how many tokens a
    request's prompt has; None where nobody can. remembered: what /v1/responses has answered. news:
    is set when the next request comes. check: raises Refused for what the policy cannot be asked.
    refused: what its last call was refused with, "" once it went on and a later request was
    accepted."""

    def __init__(self, key: str):
        self.key = key
        self.check: Callable[[Asked], None] = lambda asked: None
        self.refused = ""
        self.requests: asyncio.Queue[tuple[Asked, asyncio.Future[Reply]]] = asyncio.Queue()
        self.news = asyncio.Event()
        self.reward: float | None = None
        self.step_reward: float | None = None
        self.open = ""
        self.closed = ""
        self.retrieve: Callable[[str, int], Awaitable[list[Passage]]] | None = None
        self.count: Callable[[Asked], int] | None = None
        self.remembered = Remembered()
        self._asked: collections.Counter[str] = collections.Counter()
        self._answers: dict[str, asyncio.Future[Reply]] = {}
        self._keys: dict[tuple[str, str], str] = {}

    def ask(
        self, asked: Asked, digest: str, again: bool = False, key: str = ""
    ) -> tuple[str, asyncio.Future[Reply]]:
        """Put a request into the queue, and return its id and its future answer. digest: of its
        body. again: the client says that it repeats the last request with this body, whose answer
        it then gets. key: the client's own name of the call: the same key with the same body is the
        same call, and another key is another call."""
        if self.closed:
            raise closed(self.closed)
        name = (
            self._keys.get((key, digest), "")
            if key
            else f"{digest}{self._asked[digest]}"
            if again
            else ""
        )
        if name in self._answers:
            return name, self._answers[name]
        self.check(asked)
        self.refused = ""
        self._asked[digest] += 1
        asked = msgspec.structs.replace(asked, id=f"{digest}{self._asked[digest]}")
        answer = self._answers[asked.id] = asyncio.get_running_loop().create_future()
        if key:
            self._keys[key, digest] = asked.id
        for name in [name for name, one in self._answers.items() if one.done()][:-REMEMBERED]:
            del self._answers[name]
        self._keys = {call: name for call, name in self._keys.items() if name in self._answers}
        self.requests.put_nowait((asked, answer))
        self.news.set()  # wakes all that wait now; who waits later waits for the next request
        self.news = asyncio.Event()
        return asked.id, answer

    def give(self, reward: float, response_id: str) -> None:
        """Note a reward: of the episode, or of the reply that has this id. Raises Refused if that
        reply's turn is recorded already."""
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
        """Refuse further requests, and those that wait. Of a closed session only the reason is
        kept."""
        self.closed, self.open, self.retrieve, self.count = reason, "", None, None
        self.check = lambda asked: None  # it knew the tree
        waiting = [answer for answer in self._answers.values() if not answer.done()]
        self._asked.clear()
        self._answers.clear()
        self.remembered.clear()
        self._keys.clear()
        for answer in waiting:
            answer.set_exception(closed(reason))
            answer.exception()  # nobody may be waiting for it any more


def closed(reason: str) -> Refused:
    """Return the refusal of a call of an episode that is over."""
    return Refused(f"this episode is over: {reason}", 409)


class Gateway:
    """Serves from ``start`` to ``close``. ``opened`` makes a session; ``url`` is where its key is
    taken."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self.host, self.port = host, port
        self.sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the place is taken."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._noted, _errors])
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
        for session in list(self.sessions.values()):
            self.end(session, "the gateway has ended")
        if self._runner is not None:
            await self._runner.cleanup()

    def opened(self) -> Session:
        """Return a new session."""
        session = Session(f"ck-{secrets.token_urlsafe(24)}")
        self.sessions[session.key] = session
        return session

    def end(self, session: Session, reason: str) -> None:
        """Close a session. Of the last ``CLOSED`` ones the key stays known, so that a late call is
        told why."""
        session.close(reason)
        if self.sessions.pop(session.key, None) is not None:
            self._ended[session.key] = reason
        while len(self._ended) > CLOSED:
            del self._ended[next(iter(self._ended))]

    # ------------------------------------------------------------------------------------------
    # routes

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        headers = (request.headers.get(name) for name in ("X-Api-Key", "X-Session-ID"))
        for key in (request.match_info.get("key"), bearer, *headers):
            if key in self.sessions:
                return self.sessions[key]
            if key in self._ended:
                raise closed(self._ended[key])
        raise Refused(
            "unknown key: expected the key of an episode as a bearer token, as x-api-key, in the path (/s/KEY/v1) or as"
            " X-Session-ID",
            401,
        )

    @web.middleware
    async def _noted(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Note in its session what a call was refused with."""
        said = "500: the gateway failed (the log says more)"
        try:
            response = await handler(request)
            said = f"{response.status}: {_reason(response)}"
        except web.HTTPException as error:
            said = f"{error.status}: {error.reason}"
            raise
        finally:
            if not said.startswith(("1", "2", "3")):
                with contextlib.suppress(Refused):  # it names no session
                    self._session(request).refused = said
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info.get("name")
        model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "coppice"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), body_of(await request.read())
        reward, name = body.get("reward"), body.get("response_id") or ""
        try:
            number = math.nan if isinstance(reward, bool | str | None) else float(reward)
        except (TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise Refused(
                f"`reward`: {shown(reward)}: expected a finite number; leave the call out if there is none"
            )
        if not isinstance(name, str):
            raise Refused(f"`response_id`: {shown(name)}: expected the id of a reply")
        session.give(number, name)
        return web.json_response({"status": "ok"})

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Search-R1's protocol, as of ``judges.retriever.http_server``."""
        session, body = self._session(request), body_of(await request.read())
        queries, topk = body.get("queries"), body.get("topk", 3)
        retrieve = session.retrieve  # the session forgets it when the episode ends
        if retrieve is None:
            raise Refused("this run has no retriever: set data.options.retriever = true", 404)
        if (
            not isinstance(queries, list)
            or not all(isinstance(query, str) for query in queries)
            or not queries
        ):
            raise Refused("`queries`: expected a list of at least one text")
        if isinstance(topk, bool) or not isinstance(topk, int) or not 0 < topk <= MOST_PASSAGES:
            raise Refused(
                f"`topk`: {shown(topk)}: expected a whole number from 1 to {MOST_PASSAGES}"
            )
        found = [await retrieve(query, topk) for query in queries]
        rows = [[{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in row] for row in found]
        return web.json_response({"result": rows})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = body_of(await request.read())
        return await self._answer(request, body, chat_of(body), ChatForm(_model(body)))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = body_of(await request.read())
        asked, note = responses_of(body, self._session(request).remembered)
        return await self._answer(request, body, asked, ResponsesForm(_model(body), note))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = body_of(await request.read())
        chat = anthropic.chat_body(body)
        return await self._answer(
            request, chat, chat_of(chat), anthropic.MessagesForm(body, _model(body))
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, body = self._session(request), body_of(await request.read())
        if session.count is None:
            raise Refused("nobody here can count the tokens of a request", 404)
        try:
            return web.json_response(
                {"input_tokens": session.count(chat_of(anthropic.chat_body(body, counted=True)))}
            )
        except ValueError as error:  # of the chat template
            raise Refused(str(error)) from None

    async def _answer(
        self, request: web.Request, body: dict[str, Any], asked: Asked, form: Form
    ) -> web.StreamResponse:
        _check(body)
        asked = msgspec.structs.replace(asked, stop=_stop(body))
        digest = hashlib.blake2b(await request.read(), digest_size=8).hexdigest()
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        name, answer = self._session(request).ask(
            asked, digest, again, request.headers.get("Idempotency-Key", "")
        )
        form.id += name
        if not body.get("stream"):
            return web.json_response(form.whole(await asyncio.shield(answer)))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        while not answer.done():
            await asyncio.wait([answer], timeout=KEEPALIVE_S)
            if not answer.done():
                await response.write(b": waiting\n\n")
        try:
            for chunk in form.events(
                answer.result(), bool((body.get("stream_options") or {}).get("include_usage"))
            ):
                await response.write(chunk)
        except Refused as refused:  # the status is sent already
            await response.write(form.refusal(refused))
        await response.write_eof()
        return response


def _reason(response: web.StreamResponse) -> str:
    """The reason that the body of an error gives."""
    try:
        return json.loads(str(getattr(response, "text", "")))["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return response.reason or ""


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        refused = error
    except web.HTTPException as error:
        refused = http_refused(request.method, request.path, error.status, LARGEST_BODY)
    except Fault as fault:  # of the retriever
        refused = Refused(str(fault), 503 if isinstance(fault, InfrastructureFault) else 400)
    return web.json_response(anthropic.refusal(request.path, refused), status=refused.status)


def _model(body: dict[str, Any]) -> str:
    name = body.get("model") or "policy"
    if not isinstance(name, str):
        raise Refused(f"`model`: {shown(name)}: expected a name")
    return name


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list)
        or not all(isinstance(text, str) and text for text in stop)
        or len(stop) > MOST_STOPS
    ):
        raise Refused(
            f"`stop`: {shown(stop)}: expected a text or a list of at most {MOST_STOPS} texts"
        )
    return tuple(stop)


def _check(body: dict[str, Any]) -> None:
    """Raise Refused for a field that would change the reply and is not honoured, or that is of
    another type than the protocol's."""
    text = body.get("text") or {}
    if not isinstance(text, dict):
        raise Refused(f"`text`: {shown(text)}: expected an object")
    asked = {**body, "response_format": body.get("response_format") or text.get("format")}
    for name, neutral in NEUTRAL.items():
        if asked.get(name) is not None and asked[name] not in neutral:
            raise Refused(f"`{name}`: {shown(asked[name])}: not supported here; {_REMEDIES[name]}")
    if not isinstance(body.get("stream") or False, bool):
        raise Refused(f"`stream`: {shown(body['stream'])}: expected true or false")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise Refused(f"`stream_options`: {shown(body['stream_options'])}: expected an object")
