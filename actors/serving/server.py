"""An HTTP server over the embedded engine, compatible with OpenAI's and Anthropic's: /v1/models,
/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /health.

A malformed request, or one with a field that is known to change the answer and not supported, is
answered with status 400 and the reason. A request waits while the engine is full. When a client
hangs up, its samples are aborted. ``coppice serve --model`` starts a server (docs/serve-model.md).
"""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from aiohttp import web

from coppice.actors.engines.base import OnTop
from coppice.actors.engines.local import LocalEngine
from coppice.actors.serving import anthropic, tools
from coppice.actors.serving.answers import Answer
from coppice.actors.serving.asked import body_of
from coppice.actors.serving.protocol import Asked, Completion, Refused, http_refused, read
from coppice.actors.serving.remembered import Remembered
from coppice.actors.serving.tools import Conversation, Tools
from coppice.common.chat_template import ChatTemplate
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult

LARGEST_BODY = 4 << 20
"""The most bytes of a request: four times a context of 100,000 tokens as text."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Grown = tuple[int, list[int], list[float], list[dict[int, float]]]
"""A choice, its new tokens, their log-probabilities, and the most probable tokens if they are asked
for."""


class Server:
    """Translates HTTP requests to requests of a started engine. api_key: the key that clients must
    send ("" for none)."""

    def __init__(self, engine: LocalEngine, folder: Path, *, name: str = "", api_key: str = ""):
        self.engine, self.name, self._api_key = engine, name or folder.name, api_key
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = ChatTemplate(folder)
        self.tools = Tools(self.template, self.tokenizer)
        self.remembered = Remembered(responses=256)
        self._started = int(time.time())

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_errors, self._authorized])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/v1/responses", self.responses),
                web.post("/v1/messages", self.messages),
                web.post("/v1/messages/count_tokens", self.count_tokens),
            ]
        )
        return app

    @web.middleware
    async def _authorized(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        keys = (
            request.headers.get("Authorization", ""),
            f"Bearer {request.headers.get('X-Api-Key', '')}",
        )
        expected = f"Bearer {self._api_key}".encode()
        known = any(
            hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected) for key in keys
        )
        if self._api_key and request.path != "/health" and not known:
            raise Refused(
                "expected this server's API key as a bearer token or as x-api-key",
                401,
                "invalid_api_key",
            )
        return await handler(request)

    # ------------------------------------------------------------------------------------------
    # routes

    async def health(self, request: web.Request) -> web.Response:
        """Answer that the server is healthy. Raises Refused with status 503 and the reason when the
        engine no longer serves."""
        if self.engine.ended:
            raise Refused(self.engine.ended, 503)
        return web.json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        """Answer with the one model that is served."""
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models/NAME."""
        self._check(request.match_info["name"])
        return web.json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._started, "owned_by": "coppice"}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        talk = tools.chat(body_of(await request.read()), self.name)
        if talk.plain:
            return await self._answer(request, talk.sampled, [self._prompt(talk)])
        return await self._converse(request, talk)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/responses."""
        talk = tools.responses(body_of(await request.read()), self.name, self.remembered)
        return await self._converse(request, talk)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/messages."""
        return await self._converse(
            request, tools.messages(body_of(await request.read()), self.name)
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer POST /v1/messages/count_tokens."""
        talk = tools.messages(body_of(await request.read()), self.name, counted=True)
        self._check(talk.sampled.model)
        tokens = await asyncio.to_thread(self._encode, self._prompt(talk))
        return web.json_response({"input_tokens": len(tokens)})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        asked = read(body_of(await request.read()), Completion)
        return await self._answer(request, asked, asked.prompts)

    # ------------------------------------------------------------------------------------------
    # answers

    async def _converse(self, request: web.Request, talk: Conversation) -> web.StreamResponse:
        """Answer whole, because calls are known at the end; a stream is replayed."""
        self._check(talk.sampled.model)
        ask = await self._ask(talk.sampled, self._prompt(talk))
        sampling = msgspec.structs.replace(ask.sampling, constraint=talk.constraint)
        (result,) = await self._generate([msgspec.structs.replace(ask, sampling=sampling)])
        reply = self.tools.reply(talk, result)
        if not talk.sampled.stream:
            return web.json_response(talk.form.whole(reply))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for event in talk.form.events(reply, talk.sampled.wants_usage):
            await response.write(event)
        await response.write_eof()
        return response

    def _prompt(self, talk: Conversation) -> str:
        if not self.template.available:
            raise Refused(f"model {self.name} has no chat template: use /v1/completions")
        return self.tools.prompt(talk)

    def _check(self, model: str) -> None:
        if model not in ("", self.name):
            raise Refused(
                f"`model`: {model!r}: this server has {self.name!r}", 404, "model_not_found"
            )

    async def _answer(
        self, request: web.Request, asked: Asked, prompts: list[str | list[int]]
    ) -> web.StreamResponse:
        self._check(asked.model)
        asks = [await self._ask(asked, prompt) for prompt in prompts]
        answer = Answer(asked, self.name, self.tokenizer, len(asks) * asked.n)
        if asked.stream:
            return await self._stream(request, answer, asks)
        return web.json_response(answer.whole(await self._generate(asks)))

    async def _ask(self, asked: Asked, prompt: str | list[int]) -> GenerateRequest:
        """Return the engine's request for one prompt. Raises Refused when it can never fit."""
        tokens = (
            await asyncio.to_thread(self._encode, prompt) if isinstance(prompt, str) else prompt
        )
        longest, most = self.engine.longest, self.engine.config.max_batch
        sampling = asked.sampling(longest - len(tokens))
        if asked.n > most:
            raise Refused(
                f"`n`: {asked.n}: expected at most {most}, the samples this server decodes at once (max_batch)"
            )
        if len(tokens) + sampling.max_tokens > longest:
            raise Refused(
                f"a prompt of {len(tokens)} tokens and {sampling.max_tokens} new ones are {len(tokens) + sampling.max_tokens},"
                f" the context holds {longest} (max_context): shorten the prompt or lower `max_tokens`",
                code="context_length_exceeded",
            )
        return GenerateRequest(np.array(tokens, np.int32), asked.n, sampling)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    async def _generate(
        self, asks: list[GenerateRequest], on_grown: Callable[[_Grown], None] | None = None
    ) -> list[GenerateResult]:
        """Return one result per prompt. All are started together, so that a shared prefix is
        computed once. If one fails, all are aborted."""
        running = []
        for i, ask in enumerate(asks):
            hook = None if on_grown is None else _counted_from(i * ask.n, on_grown)
            running.append(asyncio.ensure_future(self.engine.generate(ask, on_top=hook)))
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def _stream(
        self, request: web.Request, answer: Answer, asks: list[GenerateRequest]
    ) -> web.StreamResponse:
        """Send server-sent events. A failure before the first token is an ordinary refusal; a later
        failure is an event with the error."""
        grown: asyncio.Queue[_Grown | None] = asyncio.Queue()
        work = asyncio.create_task(self._generate(asks, grown.put_nowait))
        work.add_done_callback(lambda _: grown.put_nowait(None))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            event = await grown.get()
            if event is None:
                work.result()  # raises the failure that came before the first token
            await response.prepare(request)
            await _send(response, answer.opening())
            while event is not None:
                await _send(response, answer.grown(*event))
                event = await grown.get()
            await self._close(response, answer, work)
        finally:
            work.cancel()
            await asyncio.wait([work])
        return response

    async def _close(
        self, response: web.StreamResponse, answer: Answer, work: asyncio.Task[list[GenerateResult]]
    ) -> None:
        try:
            chunks: Iterable[dict[str, Any]] = answer.closing(work.result())
        except Fault as fault:
            chunks = [_refusal(fault).body()]
        await _send(response, chunks)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


def _counted_from(first: int, on_grown: Callable[[_Grown], None]) -> OnTop:
    """Return the engine's callback for one prompt, whose first choice has the index ``first``."""
    return lambda index, tokens, logprobs, top: on_grown((first + index, tokens, logprobs, top))


async def _send(response: web.StreamResponse, chunks: Iterable[dict[str, Any]]) -> None:
    for chunk in chunks:
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer every error in the protocol's form."""
    try:
        return await handler(request)
    except Refused as refused:
        error = refused
    except (DataFault, InfrastructureFault) as fault:
        error = _refusal(fault)
    except web.HTTPException as http:
        error = http_refused(request.method, request.path, http.status, LARGEST_BODY)
    return web.json_response(anthropic.refusal(request.path, error), status=error.status)


def _refusal(fault: Fault) -> Refused:
    return Refused(str(fault), 400 if isinstance(fault, DataFault) else 503)


def runner(server: Server) -> web.AppRunner:
    """Return the runner of the application. When a client hangs up, its handler is cancelled, which
    aborts its samples."""
    return web.AppRunner(server.application(), handler_cancellation=True)
