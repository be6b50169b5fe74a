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
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from aiohttp import web

from coppice.actors.engines.base import OnTokens
from coppice.actors.engines.local import LocalEngine
from coppice.actors.serving import tools
from coppice.actors.serving.answers import Answer
from coppice.actors.serving.conversations import ResponseStore
from coppice.actors.serving.http import Handler, body_of, errors, finish, refusal, stream
from coppice.actors.serving.protocol import Chat, Completion, Refused, read
from coppice.actors.serving.replies import sse
from coppice.actors.serving.tools import ServedRequest, Tools
from coppice.common.chat_template import ChatTemplate
from coppice.wire.faults import Fault
from coppice.wire.messages import GenerateRequest, GenerateResult

LARGEST_BODY = 4 << 20
"""The most bytes of a request: four times a context of 100,000 tokens as text."""

_Grown = tuple[int, list[int], list[float], list[dict[int, float]]]
"""A choice, its new tokens, their log-probabilities, and the most probable tokens."""


class Server:
    """Translates HTTP requests to requests of a started engine. api_key: "" for none."""

    def __init__(self, engine: LocalEngine, folder: Path, *, name: str = "", api_key: str = ""):
        self.engine, self.name, self._api_key = engine, name or folder.name, api_key
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = ChatTemplate(folder)
        self.tools = Tools(self.template, self.tokenizer)
        self.store = ResponseStore(responses=256)
        self._started = int(time.time())

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(
            client_max_size=LARGEST_BODY, middlewares=[errors(LARGEST_BODY), self._authorized]
        )
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
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        expected, headers = f"Bearer {self._api_key}".encode(), request.headers
        keys = (headers.get("Authorization", ""), f"Bearer {headers.get('X-Api-Key', '')}")
        sent = [key.encode("utf-8", "surrogateescape") for key in keys]
        authorized = any(hmac.compare_digest(key, expected) for key in sent)
        if self._api_key and request.path != "/health" and not authorized:
            raise Refused(
                "expected this server's API key as a bearer token or as x-api-key",
                401,
                "invalid_api_key",
            )
        return await handler(request)

    async def health(self, request: web.Request) -> web.Response:
        """Raises Refused with status 503 when the engine no longer serves."""
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
        served = tools.chat(body_of(await request.read()), self.name)
        if served.plain:
            return await self._answer(request, served.sampled, [self._prompt(served)])
        return await self._converse(request, served)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/responses."""
        served = tools.responses(body_of(await request.read()), self.name, self.store)
        return await self._converse(request, served)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/messages."""
        served = tools.messages(body_of(await request.read()), self.name)
        return await self._converse(request, served)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer POST /v1/messages/count_tokens."""
        served = tools.messages(body_of(await request.read()), self.name, counted=True)
        self._check(served.sampled.model)
        tokens = await asyncio.to_thread(self._encode, self._prompt(served))
        return web.json_response({"input_tokens": len(tokens)})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        completion = read(body_of(await request.read()), Completion)
        return await self._answer(request, completion, completion.prompts)

    async def _converse(self, request: web.Request, served: ServedRequest) -> web.StreamResponse:
        """Answer whole, because calls are known at the end; a stream is replayed."""
        self._check(served.sampled.model)
        generate = await self._request(served.sampled, self._prompt(served))
        sampling = msgspec.structs.replace(generate.sampling, constraint=served.constraint)
        generate = msgspec.structs.replace(generate, sampling=sampling)
        (result,) = await self._generate([generate])
        reply = self.tools.reply(served, result)
        if not served.sampled.stream:
            return web.json_response(served.form.whole(reply))
        events = served.form.events(reply, served.sampled.wants_usage)
        return await finish(await stream(request), events)

    def _prompt(self, served: ServedRequest) -> str:
        if not self.template.available:
            raise Refused(f"model {self.name} has no chat template: use /v1/completions")
        return self.tools.prompt(served)

    def _check(self, model: str) -> None:
        if model not in ("", self.name):
            raise Refused(
                f"`model`: {model!r}: this server has {self.name!r}", 404, "model_not_found"
            )

    async def _answer(
        self, request: web.Request, fields: Chat | Completion, prompts: list[str | list[int]]
    ) -> web.StreamResponse:
        self._check(fields.model)
        requests = [await self._request(fields, prompt) for prompt in prompts]
        answer = Answer(fields, self.name, self.tokenizer, len(requests) * fields.n)
        if fields.stream:
            return await self._stream(request, answer, requests)
        return web.json_response(answer.whole(await self._generate(requests)))

    async def _request(self, fields: Chat | Completion, prompt: str | list[int]) -> GenerateRequest:
        """Return the engine's request for one prompt. Raises Refused when it can never fit."""
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._encode, prompt)
        longest, most = self.engine.longest, self.engine.config.max_batch
        sampling = fields.sampling(longest - len(prompt))
        if fields.n > most:
            raise Refused(
                f"`n`: {fields.n}: expected at most {most}, the samples this server decodes at once (max_batch)"
            )
        if len(prompt) + sampling.max_tokens > longest:
            raise Refused(
                f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones are {len(prompt) + sampling.max_tokens},"
                f" the context holds {longest} (max_context): shorten the prompt or lower `max_tokens`",
                code="context_length_exceeded",
            )
        return GenerateRequest(np.array(prompt, np.int32), fields.n, sampling)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    async def _generate(
        self, requests: list[GenerateRequest], on_grown: Callable[[_Grown], None] | None = None
    ) -> list[GenerateResult]:
        """Return one result per prompt. All start together; if one fails, all are aborted."""
        running = []
        for i, request in enumerate(requests):
            on_tokens = None if on_grown is None else _counted_from(i * request.n, on_grown)
            running.append(
                asyncio.ensure_future(self.engine.generate(request, on_tokens=on_tokens))
            )
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
            response = await stream(request)
            await _send(response, answer.opening())
            while event is not None:
                await _send(response, answer.grown(*event))
                event = await grown.get()
            try:
                chunks: Iterable[dict[str, Any]] = answer.closing(work.result())
            except Fault as fault:
                chunks = [refusal(fault).body()]
            return await finish(response, [*map(sse, chunks), b"data: [DONE]\n\n"])
        finally:
            work.cancel()
            await asyncio.wait([work])


def _counted_from(first: int, on_grown: Callable[[_Grown], None]) -> OnTokens:
    """Return the engine's callback for one prompt, whose first choice has the index ``first``."""
    return lambda index, tokens, logprobs, top: on_grown((first + index, tokens, logprobs, top))


async def _send(response: web.StreamResponse, chunks: Iterable[dict[str, Any]]) -> None:
    for chunk in chunks:
        await response.write(sse(chunk))


def runner(server: Server) -> web.AppRunner:
    """Return the runner. When a client hangs up, its samples are aborted."""
    return web.AppRunner(server.application(), handler_cancellation=True)
