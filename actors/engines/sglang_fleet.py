"""The servers behind a router during a run, which the router lists (``GET /workers``).

listed --reached, brought to the version, proven--> generating (in ``Remote.servers``)
listed --answers, but cannot be brought to the version--> taken out of the router
generating --unlisted, silent, or restarted--> gone
"""

import asyncio
import logging
from typing import Any

from coppice.actors.engines.sglang_api import Remote
from coppice.actors.engines.sglang_weights import SGLangWeights, UpdateRefused
from coppice.wire.faults import InfrastructureFault

log = logging.getLogger("actors.sglang")

LOOK_S = 5.0
"""Seconds between two looks at the router's list."""
PATIENCE_S = 120.0
"""Seconds of repeated requests. The router blocks a server that failed ten times for 60 s."""


class SGLangFleet:
    """One engine's servers behind a router. ``look`` must not run while weights are loaded."""

    def __init__(self, way: Remote, weights: SGLangWeights):
        self.way, self.weights = way, weights
        self._connected = set(way.servers)
        self._refused: dict[str, str] = {}
        """The name of the weights that a server could not get, by the router's number of it."""

    async def look(self) -> bool:
        """Let servers go and take servers in, as the router lists them. Return whether the fleet
        has changed. Raises InfrastructureFault when the router does not answer."""
        listed = await self.way.front.workers()
        if listed is None:
            raise InfrastructureFault(f"{self.way.front.url}/workers is gone: there was a router")
        await asyncio.gather(*(self._check(server, listed) for server in list(self.way.servers)))
        here = {server.url for server in self.way.servers}
        await asyncio.gather(
            *(self._take(url, number) for url, number in listed.items() if url not in here)
        )
        return await self.let_go()

    async def let_go(self) -> bool:
        """Close connections to servers that left. Return whether the fleet has changed."""
        before, self._connected = self._connected, set(self.way.servers)
        for server in before - self._connected:
            await server.close()
        return before != self._connected

    async def _check(self, server: Any, listed: dict[str, str]) -> None:
        """Let a server go that is unlisted, silent, or holds weights that are not ours."""
        reason = "the router no longer lists it"
        if server.url in listed:
            try:
                name = await server.weights_name()
            except InfrastructureFault as fault:
                reason = f"it does not answer ({fault})"
            else:
                if name == self.weights.named:
                    return
                reason = f"its weights are named {name!r}, not by this actor in this run"
        log.warning("%s has left: %s", server.name, reason)
        self.way.servers.remove(server)

    async def _take(self, url: str, number: str) -> None:
        """Bring a server to the version in force, or take it out of the router."""
        if self._refused.get(number) == self.weights.named:
            return
        try:
            server = await self.way.reached(url)
        except InfrastructureFault:
            return  # it is still starting, or dead, which the router notices itself
        try:
            how = await self.weights.join(server)
        except UpdateRefused as refused:
            self._refused[number] = self.weights.named
            log.warning("%s stays out until the next version: %s", server.name, refused)
        except InfrastructureFault as fault:
            if await server.answers("/model_info"):
                await self._expel(server, number, fault)
        else:
            self.way.servers.append(server)
            count, version = len(self.way.servers), self.weights.named.partition("@")[0]
            log.info(
                "%s has joined with version %s (%s); %d servers", server.name, version, how, count
            )
        finally:
            if server not in self.way.servers:  # also when this actor stops meanwhile
                await server.close()

    async def _expel(self, server: Any, number: str, reason: InfrastructureFault) -> None:
        """Take a server out of the router, which would go on sending requests to it."""
        self._refused[number] = self.weights.named
        try:
            await self.way.front.remove(number)
            done = "was taken out of the router: mend it and add it again (POST /workers)"
        except InfrastructureFault as fault:
            done = f"must be taken out of the router (DELETE /workers/{number}: {fault})"
        log.warning(
            "%s cannot be brought to the weights in force and %s: %s", server.name, done, reason
        )
