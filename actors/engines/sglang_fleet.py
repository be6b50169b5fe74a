"""The servers behind a router during a run: those that join are brought to the newest version, and
those that are gone are let go.

The router's own list (``GET /workers``) says which servers there are. States of a server: listed
--reached, brought to the version and proven--> generating (in ``Remote.servers``) --unlisted,
silent, or restarted--> gone listed --answers but cannot be brought to the version--> taken out of
the router
"""

import asyncio
import logging
from typing import Any

from coppice.actors.engines.sglang_remote import Remote
from coppice.actors.engines.sglang_weights import Refused, Weights
from coppice.wire.faults import InfrastructureFault

log = logging.getLogger("actors.sglang")

LOOK_S = 5.0
"""Seconds between two looks at the router's list. A request that met a server which is not ready is
followed by a look at once."""
PATIENCE_S = 120.0
"""A request is asked again for so long. The router itself sends nothing for 60 s to a server that
has failed ten times."""


def singly(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bodies of the single sequences of a request: a router takes one sequence in each."""
    listed = [
        name for name in ("input_ids", "rid", "sampling_params", "image_data") if name in body
    ]
    return [
        body | {name: body[name][index] for name in listed} for index in range(len(body["rid"]))
    ]


class Fleet:
    """One engine's servers behind a router. ``look`` must not run while weights are loaded."""

    def __init__(self, way: Remote, weights: Weights):
        self.way, self.weights = way, weights
        self._known = set(way.servers)
        self._refused: dict[str, str] = {}
        """By the router's number of a server: the name of the weights that could not be had for it.
        """

    async def look(self) -> bool:
        """Let servers go and take servers in, as the router lists them. Return whether the fleet
        has changed since the last look.

        Raises InfrastructureFault when the router does not answer."""
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
        """Close the connections to servers that take no part any more. Return whether the fleet has
        changed since this was last done."""
        before, self._known = self._known, set(self.way.servers)
        for server in before - self._known:
            await server.close()
        return before != self._known

    async def _check(self, server: Any, listed: dict[str, str]) -> None:
        """Let a server go that is not listed any more, does not answer, or holds weights that this
        actor has not put there."""
        reason = "the router no longer lists it"
        if server.url in listed:
            try:
                label = await server.named()
            except InfrastructureFault as fault:
                reason = f"it does not answer ({fault})"
            else:
                if label == self.weights.named:
                    return
                reason = f"its weights are named {label!r}: it was started anew, or somebody else has updated it"
        log.warning("%s has left: %s", server.name, reason)
        self.way.servers.remove(server)

    async def _take(self, url: str, number: str) -> None:
        """Bring a server to the version in force and take it in, or take it out of the router when
        it cannot be brought there."""
        if self._refused.get(number) == self.weights.named:
            return
        try:
            server = await self.way.reached(url)
        except InfrastructureFault:
            return  # it is still starting, or dead, which the router notices itself
        try:
            how = await self.weights.join(server)
        except Refused as refused:
            self._refused[number] = self.weights.named
            log.warning("%s stays out until the next version: %s", server.name, refused)
        except InfrastructureFault as fault:
            if await server.alive():
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
            done = f"must be taken out of the router (DELETE /workers/{number}), which refused it here ({fault})"
        log.warning(
            "%s cannot be brought to the weights in force and %s: %s", server.name, done, reason
        )
