"""A server of OpenAI's and Anthropic's protocols through which agents speak with the policy. Each
key is the session of one episode, in which a request waits until the episode answers it.

Any model name is the policy's, and the run's sampling settings count, not the client's. A stream is
a whole reply, replayed.
"""

import asyncio
import collections
import contextlib
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from coppice.actors.serving import protocol
from coppice.actors.serving.conversations import Conversation, chat_of, translated
from coppice.actors.serving.protocol import RequestRefused
from coppice.actors.serving.replies import Reply, send
from coppice.actors.serving.responses import ResponseStore
from coppice.wire.messages import TOPK_MOST, Passage

LARGEST_BODY = 16 << 20
"""The most bytes of a request; histories come whole with every call."""
REMEMBERED = 4
"""Answered requests of a session that are kept for a client that asks again."""
CLOSED = 10_000
"""Ended sessions whose keys and reasons are kept, so that a late call is told why it is refused."""
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_PROBABILITIES = "none: log-probabilities stand in the tree (coppice trees)"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "1: candidates are the run's own (scheduler.strategy_options.k)"),
    "response_format": (({"type": "text"},), "none: say it in the prompt, or offer a tool"),
    "logprobs": ((False,), _PROBABILITIES),
    "top_logprobs": ((0,), _PROBABILITIES),
    "functions": (([],), "none: they are called `tools` now"),
    "function_call": (("none", "auto"), "none: it is called `tool_choice` now"),
}
"""Fields that would change a reply: their values without effect, and what is expected instead."""


class _Fields(msgspec.Struct):
    """What counts of a request besides its conversation."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    stop: str | list[_Text] | None = None


class _Reward(msgspec.Struct):
    reward: float
    response_id: str | None = None


class _Retrieval(msgspec.Struct):
    queries: Annotated[list[str], msgspec.Meta(min_length=1)]
    topk: Annotated[int, msgspec.Meta(ge=1, le=TOPK_MOST)] | None = None
    return_scores: bool = False


class Session:
    """The episode that belongs to a key, and its requests in the order in which they came."""

    def __init__(self, key: str):
        self.key = key
        self.check: Callable[[Conversation], None] = lambda conversation: None
        """Raises RequestRefused for what the policy cannot be asked."""
        self.refused = ""
        """What the last call was refused with, "" once a later request was accepted."""
        self.waiting: dict[str, Conversation] = {}
        """Requests without an answer by their ids, oldest first."""
        self.news = asyncio.Event()
        """Set when the next request comes."""
        self.reward: float | None = None
        """The reward of the episode, None if nobody gave one."""
        self.step_reward: float | None = None
        self.open = ""
        """The request whose reply can be rewarded: the last one answered."""
        self.closed = ""
        self.retrieve: Callable[[str, int], Awaitable[list[Passage]]] | None = None
        """Asks the run's retriever for a query and a number of passages."""
        self.count: Callable[[Conversation], int] | None = None
        """Returns the tokens of a request's prompt."""
        self.responses = ResponseStore()
        self._times: collections.Counter[str] = collections.Counter()
        self._answers: dict[str, asyncio.Future[Reply]] = {}

    def ask(
        self, conversation: Conversation, digest: str, again: bool = False
    ) -> tuple[str, asyncio.Future[Reply]]:
        """Queue a request; return its id and its future answer. digest: of its body. again: the
        client repeats its last request with this body."""
        if self.closed:
            raise closed(self.closed)
        name = f"{digest}{self._times[digest]}"
        if again and name in self._answers:
            return name, self._answers[name]
        self.check(conversation)
        self.refused = ""
        self._times[digest] += 1
        name = f"{digest}{self._times[digest]}"
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        for old in [old for old, one in self._answers.items() if one.done()][:-REMEMBERED]:
            del self._answers[old]
        self.waiting[name] = msgspec.structs.replace(conversation, id=name)
        self.news.set()  # wakes all that wait now; who waits later waits for the next request
        self.news = asyncio.Event()
        return name, answer

    def answer(self, request: Conversation, reply: Reply) -> None:
        self.open, self.step_reward = request.id, None
        del self.waiting[request.id]
        self._answers[request.id].set_result(reply)

    def give(self, reward: float, response_id: str) -> None:
        """Keep the reward of the episode or a reply. Raises RequestRefused for a late one."""
        if not response_id:
            self.reward = reward
        elif self.open and response_id.endswith(f"-{self.open}"):
            self.step_reward = reward
        else:
            wish = "expected the reply that was given last, before another request and the end"
            raise RequestRefused(f"`response_id`: {response_id[:80]!r}: {wish}", 409)

    def close(self, reason: str) -> None:
        """Refuse further requests and those that wait. Only the reason is kept."""
        self.closed, self.open, self.retrieve, self.count = reason, "", None, None
        self.check = lambda conversation: None  # it knew the tree
        for name in self.waiting:
            self._answers[name].set_exception(closed(reason))
            self._answers[name].exception()  # nobody may be waiting for it any more
        self.waiting, self._answers, self.responses = {}, {}, ResponseStore()
        self._times.clear()


def closed(reason: str) -> RequestRefused:
    """Return the refusal of a call of an episode that is over."""
    return RequestRefused(f"this episode is over: {reason}", 409)


class Gateway:
    """Serves from ``start`` to ``close``. ``opened`` makes a session."""

    def __init__(self) -> None:
        self.port = 0
        self.sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the place is taken."""
        middlewares = [protocol.errors(LARGEST_BODY, self._keep_refusal)]
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=middlewares)
        for prefix in ("/v1", "/s/{key}/v1"):
            for dialect in ("chat/completions", "responses", "messages"):
                app.router.add_post(f"{prefix}/{dialect}", self._answer)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{name:.+}}", self._models)
            app.router.add_post(f"{prefix}/episode/reward", self._reward)
            app.router.add_post(f"{prefix}/retrieve", self._retrieve)
        self._runner = web.AppRunner(
            app, handler_cancellation=False, shutdown_timeout=1.0, access_log=None
        )  # an answer that nobody takes is still the episode's
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def close(self) -> None:
        for session in list(self.sessions.values()):
            self.end(session, "the gateway has ended")
        if self._runner is not None:
            await self._runner.cleanup()

    def opened(self) -> Session:
        session = Session(f"ck-{secrets.token_urlsafe(24)}")
        self.sessions[session.key] = session
        return session

    def end(self, session: Session, reason: str) -> None:
        """Close a session. Its key stays known for a while, so that a late call is told why."""
        session.close(reason)
        if self.sessions.pop(session.key, None) is not None:
            self._ended[session.key] = reason
        while len(self._ended) > CLOSED:
            del self._ended[next(iter(self._ended))]

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        headers = (request.headers.get(name) for name in ("X-Api-Key", "X-Session-ID"))
        for key in (request.match_info.get("key"), bearer, *headers):
            if key in self.sessions:
                return self.sessions[key]
            if key in self._ended:
                raise closed(self._ended[key])
        places = "a bearer token, x-api-key, X-Session-ID or in the path (/s/KEY/v1)"
        raise RequestRefused(f"unknown key: expected an episode's key as {places}", 401)

    def _keep_refusal(self, request: web.Request, reason: str) -> None:
        if request.path.endswith(("/retrieve", "/episode/reward")) and reason.startswith("4"):
            return  # no call of the policy, and the agent's own mistake
        with contextlib.suppress(RequestRefused):  # it names no session
            self._session(request).refused = reason

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info.get("name")
        model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "coppice"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        given = protocol.converted(protocol.body_of(await request.read()), _Reward)
        session.give(given.reward, given.response_id or "")
        return web.json_response({"status": "ok"})

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Search-R1's protocol, as of ``judges.retriever.http_server``."""
        session = self._session(request)
        wanted = protocol.converted(protocol.body_of(await request.read()), _Retrieval)
        retrieve = session.retrieve  # forgotten when the episode ends, also while a body is read
        if retrieve is None:
            fault = "this run has no retriever: set data.options.retriever = true"
            raise RequestRefused(fault, 404)
        found = [await retrieve(query, wanted.topk or 3) for query in wanted.queries]
        listed = [[passage.listed(wanted.return_scores) for passage in row] for row in found]
        return web.json_response({"result": listed})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, body = self._session(request), protocol.body_of(await request.read())
        if session.count is None:
            raise RequestRefused("nobody here can count the tokens of a request", 404)
        body, _ = translated(request.path, body, session.responses)
        try:
            tokens = session.count(chat_of(body))
        except ValueError as error:  # of the chat template
            raise RequestRefused(str(error)) from None
        return web.json_response({"input_tokens": tokens})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of any dialect, read as one of chat completions."""
        raw = await request.read()
        body, session = protocol.body_of(raw), self._session(request)
        body, form_of = translated(request.path, body, session.responses)
        conversation, fields = chat_of(body), protocol.converted(body, _Fields)
        for name, (neutral, wish) in UNSUPPORTED.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise protocol.unexpected(name, body[name], wish)
        stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        conversation = msgspec.structs.replace(conversation, stop=tuple(filter(None, stop)))
        digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        name, answer = session.ask(conversation, digest, again)
        form = form_of(fields.model or "policy", name)
        usage = bool((fields.stream_options or {}).get("include_usage"))
        return await send(request, form, answer, bool(fields.stream), usage)
