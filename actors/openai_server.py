"""An OpenAI-compatible HTTP server over the embedded engine: /v1/models, /v1/completions, /v1/chat/completions.

``python -m actors.openai_server --model FOLDER --port N``. A request of another shape is answered 400 with the reason.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import jinja2.sandbox
import msgspec
import numpy as np
import tokenizers
from aiohttp import web

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from wire.faults import DataFault, InfrastructureFault
from wire.messages import GenerateRequest, Sample, Sampling


class _Message(msgspec.Struct):
    role: str
    content: str


class _Common(msgspec.Struct, kw_only=True):
    model: str = ""
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | int | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]


class _Completion(_Common, kw_only=True):
    prompt: str


class Server:
    """Translates HTTP requests to engine requests."""

    def __init__(self, engine: LocalEngine, folder: Path):
        self.engine, self.name = engine, folder.name
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = folder / "chat_template.jinja"
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = sandbox.from_string(template.read_text()) if template.is_file() else None

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
        except msgspec.DecodeError as error:
            return _refused(str(error))
        if self.template is None:
            return _refused(f"model {self.name} has no chat template: use /v1/completions")
        text = self.template.render(
            messages=[msgspec.to_builtins(m) for m in asked.messages],
            add_generation_prompt=True,
            bos_token="",
            eos_token="",
        )
        return await self._answer(text, asked, "chat.completion")

    async def completions(self, request: web.Request) -> web.Response:
        """Plain completions."""
        try:
            asked = msgspec.json.decode(await request.read(), type=_Completion)
        except msgspec.DecodeError as error:
            return _refused(str(error))
        return await self._answer(asked.prompt, asked, "text_completion")

    async def _answer(self, text: str, asked: _Common, kind: str) -> web.Response:
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
        body = {"object": kind, "created": int(time.time()), "model": self.name, "choices": choices, "usage": usage}
        return web.json_response(body)

    def _choice(self, index: int, sample: Sample, stop: list[str], asked: _Common, kind: str) -> dict[str, Any]:
        text = self.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        text = text[: min([p for p in (text.find(s) for s in stop) if p >= 0], default=len(text))]
        body: dict[str, Any] = {"index": index, "finish_reason": sample.finish}
        if kind == "chat.completion":
            body["message"] = {"role": "assistant", "content": text}
        else:
            body["text"] = text
        if asked.logprobs:
            pieces = [self.tokenizer.decode([token]) for token in sample.tokens.tolist()]
            pairs = zip(pieces, sample.logprobs.tolist(), strict=True)
            body["logprobs"] = {"content": [{"token": token, "logprob": value} for token, value in pairs]}
        return body


def _refused(reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "invalid_request_error"}}, status=400)


async def _serve(given: argparse.Namespace) -> None:
    engine = LocalEngine(str(given.model), ActorsConfig(threads=given.threads, max_context=given.max_context))
    await engine.start()
    runner = web.AppRunner(Server(engine, given.model).application())
    await runner.setup()
    try:
        await web.TCPSite(runner, given.host, given.port).start()
        print(f"serving {given.model.name} at http://{given.host}:{given.port}/v1", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
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
