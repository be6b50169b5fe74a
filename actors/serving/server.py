"""An HTTP server over the embedded engine, compatible with OpenAI's and Anthropic's: /v1/models,
/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /health.

A malformed request, or one with a field that is known to change the answer and not supported, is
answered with status 400 and the reason. A request waits while the engine is full. When a client
hangs up, its samples are aborted. ``coppice serve --model`` starts a server (docs/serve-model.md).
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from aiohttp import web

from coppice.actors.engines.local import LocalEngine
from coppice.actors.serving import protocol, tools
from coppice.actors.serving.answers import Answer
from coppice.actors.serving.conversations import ResponseStore
from coppice.common.chat_template import ChatTemplate
from coppice.wire.faults import Fault
from coppice.wire.messages import GenerateRequest, GenerateResult

LARGEST_BODY = 4 << 20
"""The most bytes of a request: four times a context of 100,000 tokens as text."""

_Fields = protocol.ChatFields | protocol.CompletionFields
_Grown = tuple[int, list[int], list[float], list[dict[int, float]]]
"""A choice, its new tokens, their log-probabilities, and the most probable tokens."""


class Server:
    """Translates HTTP requests to requests of a started engine. api_key: "" for none."""

    def __init__(self, engine: LocalEngine, folder: Path, *, name: str = "", api_key: str = ""):
        self.engine, self.name, self._api_key = engine, name or folder.name, api_key
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.conversing = tools.Conversing(ChatTemplate(folder), self.tokenizer)
        self.store = ResponseStore(responses=256)
        self._started = int(time.time())

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        middlewares = [protocol.errors(LARGEST_BODY), self._authorized]
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=middlewares)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        return app

    @web.middleware
    async def _authorized(
        self, request: web.Request, handler: protocol.Handler
    ) -> web.StreamResponse:
        expected, headers = f"Bearer {self._api_key}".encode(), request.headers
        keys = (headers.get("Authorization", ""), f"Bearer {headers.get('X-Api-Key', '')}")
        sent = [key.encode("utf-8", "surrogateescape") for key in keys]
        authorized = any(hmac.compare_digest(key, expected) for key in sent)
        if self._api_key and request.path != "/health" and not authorized:
            reason = "expected this server's API key as a bearer token or as x-api-key"
            raise protocol.RequestRefused(reason, 401, "invalid_api_key")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        if self.engine.ended:
            raise protocol.RequestRefused(self.engine.ended, 503)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "coppice",
        }
        if name := request.match_info.get("name"):
            self._check(name)
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        served = tools.chat(protocol.body_of(await request.read()), self.name)
        if served.plain:
            return await self._answer(request, served.sampled, [self.conversing.prompt(served)])
        return await self._converse(request, served)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = protocol.body_of(await request.read())
        return await self._converse(request, tools.responses(body, self.name, self.store))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        served = tools.messages(protocol.body_of(await request.read()), self.name)
        return await self._converse(request, served)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        served = tools.messages(protocol.body_of(await request.read()), self.name, counted=True)
        self._check(served.sampled.model)
        tokens = await asyncio.to_thread(self._encode, self.conversing.prompt(served))
        return web.json_response({"input_tokens": len(tokens)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        completion = protocol.read(
            protocol.body_of(await request.read()), protocol.CompletionFields
        )
        return await self._answer(request, completion, completion.prompts)

    async def _converse(self, request: web.Request, served: tools.ServedRequest) -> Any:
        """Answer whole, because calls are known at the end; a stream is replayed."""
        self._check(served.sampled.model)
        generate = await self._request(served.sampled, self.conversing.prompt(served))
        sampling = msgspec.structs.replace(generate.sampling, constraint=served.constraint)
        generate = msgspec.structs.replace(generate, sampling=sampling)
        (result,) = await self._generate([generate])
        reply = self.conversing.reply(served, result)
        if not served.sampled.stream:
            return web.json_response(served.form.whole(reply))
        events = served.form.events(reply, served.sampled.wants_usage)
        return await protocol.finish(await protocol.stream(request), events)

    def _check(self, model: str) -> None:
        if model not in ("", self.name):
            reason = f"`model`: {model!r}: this server has {self.name!r}"
            raise protocol.RequestRefused(reason, 404, "model_not_found")

    async def _answer(
        self, request: web.Request, fields: _Fields, prompts: list[str | list[int]]
    ) -> web.StreamResponse:
        self._check(fields.model)
        requests = [await self._request(fields, prompt) for prompt in prompts]
        answer = Answer(fields, self.name, self.tokenizer, len(requests) * fields.n)
        if fields.stream:
            return await self._stream(request, answer, requests)
        return web.json_response(answer.whole(await self._generate(requests)))

    async def _request(self, fields: _Fields, prompt: str | list[int]) -> GenerateRequest:
        """Return the engine's request for one prompt. Raises RequestRefused if none can fit."""
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._encode, prompt)
        longest, most = self.engine.longest, self.engine.config.max_batch
        sampling = fields.sampling(longest - len(prompt))
        if fields.n > most:
            raise protocol.unexpected(
                "n", fields.n, f"at most {most}, the samples of a batch (max_batch)"
            )
        if (whole := len(prompt) + sampling.max_tokens) > longest:
            parts = (
                f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones are {whole}"
            )
            remedy = "shorten the prompt or lower `max_tokens`"
            fault = f"{parts}, the context holds {longest} (max_context): {remedy}"
            raise protocol.RequestRefused(fault, code="context_length_exceeded")
        return GenerateRequest(np.array(prompt, np.int32), fields.n, sampling)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    async def _generate(
        self, requests: list[GenerateRequest], on_grown: Callable[[_Grown], None] | None = None
    ) -> list[GenerateResult]:
        """Return one result per prompt. All start together; if one fails, all are aborted."""

        def grown(first: int, index: int, *new: Any) -> None:
            if on_grown is not None:
                on_grown((first + index, *new))

        running = []
        for i, request in enumerate(requests):
            on_tokens = None if on_grown is None else partial(grown, i * request.n)
            work = self.engine.generate(request, on_tokens=on_tokens)
            running.append(asyncio.ensure_future(work))
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def _stream(
        self, request: web.Request, answer: Answer, requests: list[GenerateRequest]
    ) -> web.StreamResponse:
        """Send events. A failure before the first token is a refusal, a later one an event."""
        grown: asyncio.Queue[_Grown | None] = asyncio.Queue()
        work = asyncio.create_task(self._generate(requests, grown.put_nowait))
        work.add_done_callback(lambda _: grown.put_nowait(None))
        try:
            event = await grown.get()
            if event is None:
                work.result()  # raises the failure that came before the first token
            response = await protocol.stream(request)
            chunks: Iterable[dict[str, Any]] = answer.opening()
            while event is not None:
                for chunk in [*chunks, *answer.grown(*event)]:
                    await response.write(protocol.sse(chunk))
                chunks, event = (), await grown.get()
            try:
                chunks = [*chunks, *answer.closing(work.result())]
            except Fault as fault:
                chunks = [protocol.refusal(fault).body()]
            return await protocol.finish(
                response, [*map(protocol.sse, chunks), b"data: [DONE]\n\n"]
            )
        finally:
            work.cancel()
            await asyncio.wait([work])


def runner(server: Server) -> web.AppRunner:
    """Return the runner. When a client hangs up, its samples are aborted."""
    return web.AppRunner(server.application(), handler_cancellation=True)
