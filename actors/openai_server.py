"""An OpenAI-compatible HTTP server over the embedded engine: /v1/models, /v1/completions, /v1/chat/completions.

``python -m actors.openai_server --model FOLDER --port N``. A request of another shape, or with a field that would do nothing here,
is answered 400 with the reason. A client that hangs up aborts its samples.
"""

import argparse
import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import jinja2
import jinja2.sandbox
import msgspec
import numpy as np
import tokenizers
from aiohttp import web

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from wire.faults import DataFault, InfrastructureFault
from wire.messages import GenerateRequest, Sample, Sampling

_Stop = Annotated[str, msgspec.Meta(min_length=1)]


class _Message(msgspec.Struct):
    role: str
    content: str


class _Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    max_tokens: int = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    n: int = 1
    stop: _Stop | list[_Stop] | None = None
    seed: int | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        if self.stream:
            raise ValueError("`stream`: true: expected false, this server answers whole")
        if 0 < self.temperature < 1e-3:  # scaled logits would leave float32
            raise ValueError(f"`temperature`: {self.temperature}: expected 0 (greedy) or at least 0.001")


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class _Completion(_Common, kw_only=True):
    prompt: str
    logprobs: Literal[0, 1] | None = None
    """How many alternatives: the sampled token alone is known here, so 1 is answered as 0."""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class Server:
    """Translates HTTP requests to engine requests."""

    def __init__(self, engine: LocalEngine, folder: Path):
        self.engine, self.name = engine, folder.name
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        path, settings = folder / "tokenizer_config.json", {}
        if path.is_file():
            settings = json.loads(path.read_text())
        self.special = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
        template, path = settings.get("chat_template"), folder / "chat_template.jinja"
        if path.is_file():
            template = path.read_text()
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.globals["raise_exception"] = _raise
        self.template = sandbox.from_string(template) if isinstance(template, str) else None

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
            ]
        )
        return app

    async def models(self, request: web.Request) -> web.Response:
        """The one model served."""
        return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def chat(self, request: web.Request) -> web.Response:
        """Chat completions."""
        try:
            asked = msgspec.json.decode(await request.read(), type=_Chat)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refused(str(error))
        if self.template is None:
            return _refused(f"model {self.name} has no chat template: use /v1/completions")
        messages = [msgspec.to_builtins(m) for m in asked.messages]
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, **self.special)
        except jinja2.TemplateError as error:
            return _refused(str(error))
        return await self._answer(text, asked, "chat.completion")

    async def completions(self, request: web.Request) -> web.Response:
        """Plain completions."""
        try:
            asked = msgspec.json.decode(await request.read(), type=_Completion)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refused(str(error))
        return await self._answer(asked.prompt, asked, "text_completion")

    async def _answer(self, text: str, asked: _Chat | _Completion, kind: str) -> web.Response:
        tokens = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        sampling = Sampling(asked.max_tokens, asked.temperature, asked.top_p, 0, stop, asked.seed)
        try:
            result = await self.engine.generate(GenerateRequest(tokens, asked.n, sampling))
        except DataFault as fault:
            return _refused(str(fault))
        except InfrastructureFault as fault:
            return web.json_response({"error": {"message": str(fault), "type": "server_error"}}, status=503)
        made = sum(len(sample.tokens) for sample in result.samples)
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": made,
            "total_tokens": len(tokens) + made,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        }
        choices = [self._choice(i, sample, stop, asked, kind) for i, sample in enumerate(result.samples)]
        body = {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}
        return web.json_response(body | {"choices": choices, "usage": usage})

    def _choice(
        self, index: int, sample: Sample, stop: list[str], asked: _Chat | _Completion, kind: str
    ) -> dict[str, Any]:
        text = self.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        text = text[: min([p for p in (text.find(s) for s in stop) if p >= 0], default=len(text))]
        body: dict[str, Any] = {"index": index, "finish_reason": sample.finish}
        if kind == "chat.completion":
            body["message"] = {"role": "assistant", "content": text}
        else:
            body["text"] = text
        if asked.wants_logprobs:
            pieces = [self.tokenizer.decode([token], skip_special_tokens=False) for token in sample.tokens.tolist()]
            body["logprobs"] = _logprobs(pieces, sample.logprobs.tolist(), kind)
        return body


def runner(server: Server) -> web.AppRunner:
    """What serves the application; a handler whose client hangs up is cancelled, which frees its samples."""
    return web.AppRunner(server.application(), handler_cancellation=True)


def _logprobs(pieces: list[str], values: list[float], kind: str) -> dict[str, Any]:
    """Of the sampled tokens, in the shape of each protocol; of all of them, those of a stop string too."""
    if kind == "text_completion":
        return {"tokens": pieces, "token_logprobs": values}
    return {"content": [{"token": piece, "logprob": value} for piece, value in zip(pieces, values, strict=True)]}


def _content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(reason: str) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(reason)


def _refused(reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "invalid_request_error"}}, status=400)


async def _serve(given: argparse.Namespace) -> None:
    engine = LocalEngine(str(given.model), ActorsConfig(threads=given.threads, max_context=given.max_context))
    await engine.start()
    served = runner(Server(engine, given.model))
    await served.setup()
    try:
        await web.TCPSite(served, given.host, given.port).start()
        print(f"serving {given.model.name} at http://{given.host}:{given.port}/v1", flush=True)
        await asyncio.Event().wait()
    finally:
        await served.cleanup()
        await engine.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Serve a model over the OpenAI-compatible protocol.")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-context", type=int, default=4096)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
