"""SGLang servers that already run, reached by URL."""

import asyncio
import contextlib
import os
import socket
from typing import Any
from urllib.parse import urlparse

import msgspec

from actors.config import ActorsConfig
from actors.engines.sglang_api import Facts, Http
from wire.faults import InfrastructureFault

_EACH = ("input_ids", "rid", "sampling_params", "extra_key", "lora_path")
"""Fields of /generate that are lists when a request asks for several sequences."""


class Remote:
    """The way "url": servers that already run and go on after ``close``. Behind a router, the workers take the weights."""

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
        """Open the connections. When a server does not answer, all are closed again and InfrastructureFault is raised."""
        try:
            for server in self._all:
                await server.start()
            await self._ready()
        except BaseException:
            await self.close()
            raise

    async def _ready(self) -> None:
        for server in self.servers:
            for path in ("/end_weight_update", "/continue_generation"):  # an earlier actor may have died in an update
                with contextlib.suppress(InfrastructureFault):
                    await server.call(path, {}, 10.0)
        for server in self._all:
            if not await server.healthy():
                raise InfrastructureFault(f"{server.name} does not answer /health: is it running there?")

    async def facts(self) -> Facts:
        """Return the facts of the first server, with the capacity of all servers together."""
        each = [await server.facts(self.model) for server in self.servers]
        return msgspec.structs.replace(each[0], capacity=sum(facts.capacity for facts in each))

    async def generate(self, body: dict[str, Any]) -> Any:
        """Return the answer to POST /generate. SGLang's router takes one sequence per request, so several sequences become parallel requests."""
        if self.front in self.servers or not isinstance(body["input_ids"][0], list):
            return await self.front.call("/generate", body, self.timeout_s)
        listed = [name for name in _EACH if isinstance(body.get(name), list)]
        alone = [body | {name: body[name][index] for name in listed} for index in range(len(body["input_ids"]))]
        tasks = [asyncio.create_task(self.front.call("/generate", one, self.timeout_s)) for one in alone]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # one failure is the answer of the whole request
                task.cancel()
            raise

    async def abort(self, names: list[str]) -> None:
        """Stop requests wherever they run."""
        for server in self.servers:
            await server.abort(names)

    async def died(self) -> str:
        """Return the reason when some server was silent three times in a row."""
        silent = 0
        while silent < 3:
            await asyncio.sleep(10.0)
            alive = [await server.alive() for server in self.servers]
            silent = 0 if all(alive) else silent + 1
        return f"{self.name} no longer answers /model_info"

    async def close(self) -> None:
        """Close the connections. The servers go on."""
        for server in self._all:
            await server.close()

    def is_here(self) -> bool:
        """Return whether all servers run on this host."""
        hosts = {urlparse(server.url).hostname for server in self.servers}
        return hosts <= {"127.0.0.1", "localhost", "::1", socket.gethostname()}
