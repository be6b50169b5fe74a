"""SGLang servers that already run, reached by URL."""

import asyncio
import contextlib
import os
import time
from typing import Any

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.sglang_api import Facts, Http
from coppice.wire.faults import InfrastructureFault

_STEP_S = 1.0
"""Seconds between two looks for the first server."""


class Remote:
    """The way "url": a server, or a router and the servers behind it, which may come and go. All of
    them go on after ``close``."""

    elastic = False

    def __init__(self, url: str, model: str, config: ActorsConfig):
        settings, self.model = config.sglang, model
        self._key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""
        if settings.api_key_env and not self._key:
            raise ValueError(
                f"environment variable {settings.api_key_env} is empty: it must hold the API key of {url}"
            )
        self.timeout_s, self.start_s = settings.request_timeout_s, settings.start_timeout_s
        self.front = Http(url, self._key, self.timeout_s, config.capacity)
        self.servers, self.name = [self.front], self.front.name

    async def start(self) -> None:
        """Open the connections. When nothing answers there, all are closed again and
        InfrastructureFault is raised."""
        try:
            await self.front.start()
            await self._go_on(self.front)
            if not await self.front.healthy():
                raise InfrastructureFault(
                    f"{self.front.name} does not answer /health: is it running there?"
                )
            if (listed := await self.front.workers()) is not None:
                self.elastic = True
                await self._first(listed)
        except BaseException:
            await self.close()
            raise

    async def _first(self, listed: dict[str, str]) -> None:
        """Wait until a server behind the router answers. Raises InfrastructureFault when none does
        in ``start_timeout_s``."""
        self.servers, end = [], time.monotonic() + self.start_s
        while True:
            for url in listed:
                with contextlib.suppress(InfrastructureFault):
                    self.servers.append(await self.reached(url))
            if self.servers:
                return
            if time.monotonic() > end:
                raise InfrastructureFault(
                    f"none of the {len(listed)} servers behind the router {self.front.url} answered in actors.sglang.start_timeout_s ="
                    f" {self.start_s:g} s: add one (POST /workers)"
                )
            await asyncio.sleep(_STEP_S)
            listed = await self.front.workers() or {}

    async def reached(self, url: str) -> Http:
        """Return a server behind the router, not yet among ``servers``. Raises InfrastructureFault
        when it does not answer."""
        server = Http(url, self._key, self.timeout_s, 1)
        try:
            await server.start()
            await self._go_on(server)
            if not await server.healthy():
                raise InfrastructureFault(f"{server.name} does not answer /health")
        except BaseException:
            await server.close()
            raise
        return server

    async def _go_on(self, server: Http) -> None:
        """End what an earlier actor, which may have died in an update, has left open."""
        for path in ("/end_weight_update", "/continue_generation"):
            with contextlib.suppress(InfrastructureFault):
                await server.call(path, {}, 10.0)

    async def facts(self) -> Facts:
        """Return the facts of the first server, with the capacity of all servers together."""
        each = await asyncio.gather(*(server.facts(self.model) for server in self.servers))
        return msgspec.structs.replace(each[0], capacity=sum(facts.capacity for facts in each))

    async def generate(self, body: dict[str, Any]) -> Any:
        """Return the answer to POST /generate."""
        return await self.front.call("/generate", body, self.timeout_s)

    async def abort(self, names: list[str]) -> None:
        """Stop requests wherever they run."""
        await asyncio.gather(*(server.abort(names) for server in self.servers))

    async def died(self) -> str:
        """Return the reason when the URL or all servers behind it were silent three times in a row."""
        silent = 0
        while silent < 3:
            await asyncio.sleep(10.0)
            alive = await asyncio.gather(*(server.alive() for server in self.servers))
            silent = (
                0 if any(alive) and (not self.elastic or await self.front.healthy()) else silent + 1
            )
        return f"{self.name} no longer answers" + (
            ", or no server behind it" if self.elastic else " /model_info"
        )

    async def close(self) -> None:
        """Close the connections. The servers go on."""
        for server in {self.front, *self.servers}:
            await server.close()
