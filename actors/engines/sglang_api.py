"""The calls of an SGLang server, and the three ways to reach SGLang that share them."""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

import msgspec

from actors.config import ActorsConfig
from actors.engines.weights import BaseWeights
from wire.faults import DataFault, InfrastructureFault
from wire.http import JsonClient

_EACH = ("input_ids", "rid", "sampling_params", "extra_key", "lora_path")
"""Fields of /generate that are lists when several sequences are asked for."""

NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Variables unless the user sets them: SGLang would spend 65 s on dumps, answering nobody, before it ends after a child of it has."""

FIXED = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
"""Variables whatever the user's shell holds: with this one set, log-probabilities would be those before temperature."""


class Facts(msgspec.Struct, frozen=True):
    """What SGLang says of itself. capacity, context: tokens. vocabulary: rows of the embedding, 0 when unknown.

    version: of the weights it holds, as it was last told; "" or "default" when nobody told it. mask: the most tokens that top-p and top-k may
    leave for it to say which.
    """

    capacity: int = 0
    context: int = 0
    vocabulary: int = 0
    device: str = ""
    dtype: str = ""
    tp: int = 1
    version: str = ""
    mask: int = 4096

    @property
    def updated(self) -> bool:
        """Whether somebody has changed its weights since it started."""
        return self.version not in ("", "default", "0")


class Api(Protocol):
    """One server that holds weights."""

    name: str

    async def call(self, path: str, body: dict[str, Any], timeout_s: float, attempts: int = 1) -> dict[str, Any]:
        """POST. Raises InfrastructureFault when it fails or takes longer."""
        ...


class Way(Protocol):
    """How one engine reaches SGLang. servers: all that take part in an update."""

    name: str

    @property
    def servers(self) -> "list[Any]":
        """Each an ``Api``."""
        ...

    async def start(self) -> None: ...

    async def facts(self) -> Facts: ...

    async def generate(self, body: dict[str, Any]) -> Any: ...

    async def abort(self, names: list[str]) -> None: ...

    async def died(self) -> str: ...

    async def close(self) -> None: ...


def ways(model: str, config: ActorsConfig, place: int) -> Way:
    """The way that ``config.sglang`` names, for the actor at ``place`` (from 0)."""
    from actors.engines.sglang_inside import Inside
    from actors.engines.sglang_server import Launched

    settings = config.sglang
    if settings.way == "server":
        return Launched(model, config)
    if settings.way == "inside":
        return Inside(model, config)
    if not settings.urls:
        raise ValueError(
            'actors.sglang.way = "url" and actors.sglang.urls is empty: expected the URLs of running servers'
        )
    return Remote(settings.urls[place % len(settings.urls)], model, config)


class Http:
    """One server by URL."""

    def __init__(self, url: str, key: str, timeout_s: float, concurrency: int):
        self.url, self.name = url.rstrip("/"), f"SGLang at {url.rstrip('/')}"
        self._client = JsonClient(
            self.url, key=key, timeout_s=timeout_s, attempts=1, concurrency=max(64, 4 * concurrency)
        )

    async def start(self) -> None:
        """Open the connection pool."""
        await self._client.start()

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.close()

    async def healthy(self) -> bool:
        """Whether it answers /health now: not while it starts, nor while its generation pauses."""
        return await self._answers("/health")

    async def alive(self) -> bool:
        """Whether its process answers, paused or not."""
        return await self._answers("/model_info")

    async def _answers(self, path: str) -> bool:
        try:
            await self._client.send("GET", path, timeout_s=5.0, attempts=1)
        except (InfrastructureFault, DataFault):
            return False
        return True

    async def facts(self, model: str = "") -> Facts:
        """What it says of itself; the vocabulary is that of the folder ``model``, since an update changes what it calls its model."""
        info = await self._client.get("/server_info", timeout_s=30.0, attempts=3)
        info |= await self._client.get("/model_info", timeout_s=30.0, attempts=3)  # what updates have changed since
        return read_facts(model, info)

    async def call(self, path: str, body: dict[str, Any], timeout_s: float, attempts: int = 1) -> dict[str, Any]:
        """POST. SGLang answers 400 to an update that failed, which is no fault of the data."""
        try:
            text = await self._client.send("POST", path, body, timeout_s=timeout_s, attempts=attempts)
            answer = msgspec.json.decode(text) if text else {}
        except msgspec.DecodeError as error:
            raise InfrastructureFault(
                f"{self.name}{path} answered no JSON ({error}): is it an SGLang server?"
            ) from None
        except DataFault as fault:
            if path == "/generate":
                raise
            raise InfrastructureFault(str(fault)) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            raise InfrastructureFault(
                f"{self.name}: {path} failed: {answer.get('message') or answer.get('error_message')}"
            )
        return answer or {}

    async def send(self, path: str) -> None:
        """POST without a body, of what answers in words (/flush_cache)."""
        await self._client.send("POST", path, attempts=1)

    async def abort(self, names: list[str]) -> None:
        """Stop requests; one that has ended already is no error."""
        for name in names:
            try:
                await self.call("/abort_request", {"rid": name}, 10.0)
            except InfrastructureFault:
                return  # a server that is gone runs nothing


class Remote:
    """The way "url": servers that run already. Behind a router, the workers take the weights."""

    def __init__(self, url: str, model: str, config: ActorsConfig):
        settings, self.model = config.sglang, model
        key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""
        if settings.api_key_env and not key:
            raise ValueError(f"environment variable {settings.api_key_env} is empty: it must hold the API key of {url}")
        self.timeout_s = settings.request_timeout_s
        self.front = Http(url, key, self.timeout_s, config.capacity)
        workers = [Http(worker, key, self.timeout_s, 1) for worker in settings.workers]
        self.servers, self.name = workers or [self.front], self.front.name
        self._all = [self.front, *workers]

    async def start(self) -> None:
        """Open the connections. Raises InfrastructureFault when a server does not answer; none stays open then."""
        try:
            for server in self._all:
                await server.start()
            await self._ready()
        except BaseException:
            await self.close()
            raise

    async def _ready(self) -> None:
        for server in self.servers:
            for path in ("/end_weight_update", "/continue_generation"):  # an actor before may have died in an update
                with contextlib.suppress(InfrastructureFault):
                    await server.call(path, {}, 10.0)
        for server in self._all:
            if not await server.healthy():
                raise InfrastructureFault(f"{server.name} does not answer /health: is it running there?")

    async def facts(self) -> Facts:
        """Of the first server; capacity is that of all."""
        each = [await server.facts(self.model) for server in self.servers]
        return msgspec.structs.replace(each[0], capacity=sum(facts.capacity for facts in each))

    async def generate(self, body: dict[str, Any]) -> Any:
        """POST /generate. SGLang's router takes one sequence a request: behind it, those asked for together go out side by side."""
        if self.front in self.servers or not isinstance(body["input_ids"][0], list):
            return await self.front.call("/generate", body, self.timeout_s)
        listed = [name for name in _EACH if isinstance(body.get(name), list)]
        alone = [body | {name: body[name][index] for name in listed} for index in range(len(body["input_ids"]))]
        tasks = [asyncio.create_task(self.front.call("/generate", one, self.timeout_s)) for one in alone]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # what one of them failed with is the answer of all
                task.cancel()
            raise

    async def abort(self, names: list[str]) -> None:
        """Stop requests wherever they run."""
        for server in self.servers:
            await server.abort(names)

    async def died(self) -> str:
        """Returns when a server no longer answers three times in a row."""
        silent = 0
        while silent < 3:
            await asyncio.sleep(10.0)
            alive = [await server.alive() for server in self.servers]
            silent = 0 if all(alive) else silent + 1
        return f"{self.name} no longer answers /model_info"

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        for server in self._all:
            await server.close()

    def is_here(self) -> bool:
        """Whether all servers run on this host."""
        hosts = {urlparse(server.url).hostname for server in self.servers}
        return hosts <= {"127.0.0.1", "localhost", "::1", socket.gethostname()}


def arguments(model: str, config: ActorsConfig) -> dict[str, Any]:
    """Of sglang's ServerArgs: what the settings of an actor mean there, and the user's own."""
    given = config.sglang.arguments
    derived = given.get("enable_lora") and "lora_target_modules" not in given
    adapters = {"lora_target_modules": linear_layers(Path(model))} if derived else {}
    return {
        "model_path": model,
        "weight_version": "0",
        "context_length": config.max_context,
        "max_running_requests": config.max_batch,
        "chunked_prefill_size": config.prefill_tokens,
        "enable_cache_report": True,
        **adapters,
    } | given


def linear_layers(model: Path) -> list[str]:
    """Names of the layers that the learner's adapters change: all linear ones but the head, as PEFT's "all-linear" has them."""
    with BaseWeights(model) as base:
        names = [
            name.split(".") for name, shape in base.shapes().items() if len(shape) == 2 and name.endswith(".weight")
        ]
    return sorted({parts[-2] for parts in names} - {"embed_tokens", "lm_head"})


def read_facts(model: str, info: dict[str, Any]) -> Facts:
    """Facts from SGLang's description of itself and, where the model folder is at hand, its configuration."""
    settings: dict[str, Any] = {}
    path = Path(model) / "config.json"
    if path.is_file():
        settings = json.loads(path.read_text())
    context = info.get("context_length") or settings.get("max_position_embeddings") or 0
    return Facts(
        int(info.get("max_total_num_tokens") or 0),
        int(context),
        int(settings.get("vocab_size") or 0),
        str(info.get("device") or ""),
        str(info.get("dtype") or ""),
        int(info.get("tp_size") or 1),
        str(info.get("weight_version") or ""),
        int(info.get("sampling_mask_max_tokens") or 4096),
    )
