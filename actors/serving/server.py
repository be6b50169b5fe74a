"""An HTTP server over the embedded engine, compatible with OpenAI's and Anthropic's: /v1/models,
/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /health.

A malformed request, or one with a field that is known to change the answer and not supported, is
answered with status 400 and the reason. A request waits while the engine is full. When a client
hangs up, its samples are aborted. ``coppice serve --model`` starts a server (docs/serve-model.md).
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from aiohttp import web

from coppice.actors.engines.local import LocalEngine
from coppice.actors.environments.base import Spent
from coppice.actors.serving.conversations import Conversation, chat_of, translated
from coppice.actors.serving.protocol import Handler, RequestRefused, body_of, errors, unexpected
from coppice.actors.serving.replies import CompletionForm, Form, Reply, TokenText, send
from coppice.actors.serving.responses import ResponseStore
from coppice.actors.serving.sampling import SamplingFields, completion_of, read
from coppice.common.concurrency import gather
from coppice.common.dialogue import ChatTemplate, Renderer, until
from coppice.common.tool_calls import MARKS, Parsed, ToolCall, family_of, parse
from coppice.wire.messages import Constraint, GenerateRequest, Sample

LARGEST_BODY = 4 << 20
"""The most bytes of a request: four times a context of 100,000 tokens as text."""
_SHOWN = ("name", "reasoning_content")
"""Fields of messages that some templates read."""
_CALLS = ("tools", "tool_choice", "parallel_tool_calls")
_DEFINITIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to."""
_Reader = Callable[[str], Parsed]


class Server:
    """Translates HTTP requests to requests of a started engine. api_key: "" for none."""

    def __init__(self, engine: LocalEngine, folder: Path, *, name: str = "", api_key: str = ""):
        self.engine, self.name, self._api_key = engine, name or folder.name, api_key
        self.template, self.store = ChatTemplate(folder), ResponseStore()
        self.renderer, self.family = Renderer(self.template), family_of(self.template.source)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self.tokenizer.get_added_tokens_decoder().items()
        self._hidden = {n for n, token in added if token.special and token.content not in MARKS}
        self._started = int(time.time())

    def application(self) -> web.Application:
        middlewares = [errors(LARGEST_BODY), self._authorized]
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=middlewares)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        for dialect in ("chat/completions", "responses", "messages"):
            app.router.add_post(f"/v1/{dialect}", self._converse)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        return app

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        expected, headers = f"Bearer {self._api_key}".encode(), request.headers
        keys = (headers.get("Authorization", ""), f"Bearer {headers.get('X-Api-Key', '')}")
        sent = [key.encode("utf-8", "surrogateescape") for key in keys]
        authorized = any(hmac.compare_digest(key, expected) for key in sent)
        if self._api_key and request.path != "/health" and not authorized:
            reason = "expected this server's API key as a bearer token or as x-api-key"
            raise RequestRefused(reason, 401, "invalid_api_key")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        if self.engine.ended:
            raise RequestRefused(self.engine.ended, 503)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        head = {"id": self.name, "object": "model", "created": self._started}
        model = {**head, "owned_by": "coppice"}
        if name := request.match_info.get("name"):
            self._check(name)
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _conversation(
        self, request: web.Request
    ) -> tuple[Conversation, SamplingFields, Callable[[str, str], Form]]:
        body = body_of(await request.read())
        body, form_of = translated(request.path, body, self.store)
        conversation, fields = chat_of(body, _SHOWN), read(body, _CALLS)
        self._check(fields.model)
        return conversation, fields, form_of

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        conversation, fields, form_of = await self._conversation(request)
        messages, reader = conversation.messages, partial(_parsed, conversation, self.family)
        calls = any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if request.path.endswith("/completions") and not calls and not conversation.tools:
            reader = Parsed  # also its thoughts are text
        prompts = [await self._prompt(conversation, fields)]
        constraint = _constraint(conversation, fields)
        return await self._answer(request, fields, form_of, prompts, constraint, reader)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        prompts, fields = completion_of(body_of(await request.read()))
        self._check(fields.model)
        tokens = [await self._encode(one) if isinstance(one, str) else one for one in prompts]
        constraint = fields.constraint()
        return await self._answer(request, fields, CompletionForm, tokens, constraint, Parsed)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        conversation, fields, _ = await self._conversation(request)
        return web.json_response({"input_tokens": len(await self._prompt(conversation, fields))})

    def _check(self, model: str) -> None:
        if model not in ("", self.name):
            reason = f"`model`: {model!r}: this server has {self.name!r}"
            raise RequestRefused(reason, 404, "model_not_found")

    async def _prompt(self, conversation: Conversation, fields: SamplingFields) -> list[int]:
        """Return the tokens before the reply. Raises RequestRefused when the template does."""
        if not self.template.available:
            raise RequestRefused(f"model {self.name} has no chat template: use /v1/completions")
        switches = fields.chat_template_kwargs
        try:
            text = self.renderer.whole(conversation.messages, conversation.tools, switches)
            text.encode()  # half of a surrogate pair in a call's arguments is no text
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        return await self._encode(text)

    async def _encode(self, text: str) -> list[int]:
        made = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=False)
        return made.ids

    async def _answer(
        self, request: web.Request, fields: SamplingFields, form_of: Callable[[str, str], Form],
        prompts: list[list[int]], constraint: Constraint | None, reader: _Reader,
    ) -> web.StreamResponse:  # fmt: skip
        """Answer every prompt with ``n`` samples, or refuse what cannot fit."""
        longest, most = self.engine.longest, self.engine.config.max_batch
        if fields.n > most:
            raise unexpected("n", fields.n, f"at most {most}, the samples of a batch (max_batch)")
        requests = []
        for prompt in prompts:
            sampling = fields.sampling(longest - len(prompt), constraint)
            if (whole := len(prompt) + sampling.max_tokens) > longest:
                raise RequestRefused(
                    f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones are"
                    f" {whole}, the context holds {longest} (max_context): shorten the prompt or"
                    " lower `max_tokens`",
                    code="context_length_exceeded",
                )
            requests.append(GenerateRequest(np.array(prompt, np.int32), fields.n, sampling))
        form = form_of(self.name, uuid.uuid4().hex)
        reply = asyncio.ensure_future(self._replies(requests, fields, reader))
        try:
            return await send(request, form, reply, fields.stream, fields.wants_usage)
        finally:
            reply.cancel()

    async def _replies(
        self, requests: list[GenerateRequest], fields: SamplingFields, reader: _Reader
    ) -> Reply:
        """Return the reply to all requests. If one fails, all are aborted."""
        results = await gather(self.engine.generate(request) for request in requests)
        prompt = sum(result.prompt_tokens for result in results)
        spent = Spent(prompt, sum(result.cached_tokens for result in results))
        samples = [sample for result in results for sample in result.samples]
        first, *others = [self._reply(sample, fields, spent, reader) for sample in samples]
        return msgspec.structs.replace(first, others=others)

    def _reply(
        self, sample: Sample, fields: SamplingFields, spent: Spent, reader: _Reader
    ) -> Reply:
        tokens = [token for token in sample.tokens.tolist() if token not in self._hidden]
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        text, stop = until(text, fields.stops)
        parsed, sampled = reader(text), (len(sample.tokens), sample.finish)
        spent = Spent(spent.prompt, spent.cached, *sampled)
        told = self._told(sample) if fields.logprobs else None
        return Reply(parsed.text, parsed.calls, spent, parsed.think, stop, told)

    def _told(self, sample: Sample) -> list[TokenText]:
        def spelled(token: int) -> str:
            return self.tokenizer.decode([token], skip_special_tokens=False)

        tops = sample.top or [{}] * len(sample.tokens)
        rows = zip(sample.tokens.tolist(), sample.logprobs.tolist(), tops, strict=True)
        return [
            TokenText(spelled(token), logprob, [(spelled(t), value) for t, value in top.items()])
            for token, logprob, top in rows
        ]


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


def _parsed(conversation: Conversation, family: str, text: str) -> Parsed:
    """Read a reply. A call that cannot be read is text."""
    if not conversation.must_call:
        return parse(text, family, conversation.offered)
    try:  # the reply is the call, unless the limit or a stop string has cut it
        call = msgspec.json.decode(text, type=_Call)
    except msgspec.DecodeError:
        return Parsed(text)
    return Parsed("", [ToolCall(call.name, bytes(call.arguments).decode())])


def _constraint(conversation: Conversation, fields: SamplingFields) -> Constraint | None:
    """Return what the reply must match: a call if one is required, else what is asked."""
    wanted = fields.constraint()
    if not conversation.must_call:
        return wanted
    if wanted is not None:
        raise RequestRefused("`tool_choice`: a required call and a constraint: expected one")
    functions = [tool["function"] for tool in conversation.tools]
    offered = [one for one in functions if one["name"] in conversation.offered]
    return Constraint("json_schema", msgspec.json.encode(_one_of(offered)).decode())


def _one_of(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a call of one of the functions, with their definitions at the root."""
    calls, moved = list[dict[str, Any]](), dict[str, Any]()
    for place, function in enumerate(functions):
        given = function.get("parameters") or {"type": "object"}
        for key in _DEFINITIONS:
            if not isinstance(given.get(key) or {}, dict):
                raise unexpected(f"tools.{key}", given[key], "an object")
        text = msgspec.json.encode({k: v for k, v in given.items() if v is not None}).decode()
        for key in _DEFINITIONS:
            text = text.replace(f'"#/{key}/', f'"#/$defs/{place}.')
        parameters = msgspec.json.decode(text)
        for key in _DEFINITIONS:
            moved |= {f"{place}.{name}": value for name, value in parameters.pop(key, {}).items()}
        if '"$ref":"#"' in text:  # the parameters themselves
            text = msgspec.json.encode(parameters).decode().replace('"#"', f'"#/$defs/{place}."')
            moved[f"{place}."] = msgspec.json.decode(text)
            parameters = {"$ref": f"#/$defs/{place}."}
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        call = {"type": "object", "properties": properties, "required": [*properties]}
        calls.append({**call, "additionalProperties": False})
    return {"anyOf": calls, **({"$defs": moved} if moved else {})}
