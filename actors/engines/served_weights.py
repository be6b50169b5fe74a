"""Load a policy version into servers: pause generation, move the weights, prove that they arrived,
name them, and continue. Adapters are small files and are loaded without a pause.

A step that fails fails the update; behind a router only the failing server is let go while another
is left. The name of a version holds a mark of this actor and is given only after the proof. They
report it with every sample, so samples of weights that anybody else loaded are known by it.
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from coppice.actors.engines import weights
from coppice.actors.engines.servers import Facts, Http, Servers
from coppice.actors.engines.sglang_transport import Pull
from coppice.wire import published
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import LoadRequest

log = logging.getLogger("actors.served")

MOVING = "moving-"
"""The beginning of a server's weight version while an update is in progress."""
_ADAPTERS_KEPT = 2
"""The newest adapter and the previous one, which requests that began earlier still use."""

Transport = Literal["disk", "adapter", "distributed"]
Wanted = Literal["auto", "disk", "distributed"]


class UpdateRefused(InfrastructureFault):
    """The update was refused before anything changed."""


class Ready(msgspec.Struct, frozen=True):
    """A verified version that is ready for its transport. pulls: by server, of a broadcast. folder:
    what servers load from a disk."""

    request: LoadRequest
    chosen: Transport
    pulls: dict[Http, Pull]
    folder: str


class ServedWeights:
    """The weights of one engine's servers: ``start``, then for each version ``prepare``, ``update``
    and ``unload``. adapter: the adapter of new requests, "" for none. named: the whole
    weights in force."""

    def __init__(self, way: Servers, base: Path, wanted: Wanted):
        self.way, self.base, self.wanted = way, base, wanted
        self.adapter, self.named = "", ""
        self.facts = Facts()
        self._names: dict[str, int] = {}
        self._whole: LoadRequest | None = None
        """The last version of whole weights, None before the first update."""
        self._adapters: dict[str, str] = {}
        self._checksum = ""
        """The checksum of the whole weights that the servers hold, without adapters."""
        self._tensors: frozenset[str] = frozenset()
        """The names of these weights' tensors in the servers."""

    async def start(self) -> None:
        """Name the servers' weights."""
        self._checksum = await self._agreed(self.way.servers)
        self.facts = await self.way.facts()
        if not self.facts.updated:
            self.named = self._new_name(0)
            await self._each(self.way.servers, lambda server: server.rename(self.named))

    def order(self, name: Any) -> int:
        """Return when this actor gave this name: 0, 1, ...; -1 for any other name."""
        return self._names.get(name, -1) if isinstance(name, str) else -1

    def _new_name(self, version: int) -> str:
        """Return a name for a version's weights, which begins with its number and is used once."""
        name = f"{version}@{uuid.uuid4().hex[:12]}"
        self._names[name] = len(self._names)
        return name

    async def prepare(self, request: LoadRequest, servers: list[Http] | None = None) -> Ready:
        """Do all that can be done while requests go on. Raises UpdateRefused."""
        folder, pulls = Path(request.path), dict[Http, Pull]()
        try:
            manifest = published.read(folder, request.digest)
            chosen = choose(manifest, self.facts, self.wanted)
            if chosen == "adapter" and self.facts.updated and self._whole is None:
                raise InfrastructureFault(
                    f"{self.way.name} holds weight version {self.facts.version} from before, but an"
                    " adapter needs the base model's weights: start it anew"
                )
            if chosen == "distributed":
                pulls = await self._offered(manifest, servers or self.way.servers)
            else:
                if chosen == "disk":
                    self.way.front.check_whole()
                held = self._whole.digest if self._whole else ""
                held = held if held != request.digest else ""  # for a server that has them not
                folder = await asyncio.to_thread(_verify, self.base, folder, request.digest, held)
        except (InfrastructureFault, ValueError, OSError) as fault:
            raise UpdateRefused(str(fault)) from None
        return Ready(request, chosen, pulls, str(folder))

    async def _offered(self, manifest: published.Manifest, servers: list[Http]) -> dict[Http, Pull]:
        """Ask the learner to offer a version to all servers at once."""
        facts = await self._each(servers, lambda server: server.facts())
        limit, pairs = self.way.config.update_timeout_s, zip(servers, facts, strict=True)
        pulls = {server: Pull(server, fact, manifest, limit) for server, fact in pairs}
        shapes = await asyncio.to_thread(lambda: weights.BaseWeights(self.base).shapes)
        asks = (asyncio.to_thread(pull.ask, shapes) for pull in pulls.values())
        outcomes = await asyncio.gather(*asks, return_exceptions=True)
        if failed := [one for one in outcomes if isinstance(one, BaseException)]:
            await asyncio.gather(*(pull.release() for pull in pulls.values()))
            raise failed[0]
        return pulls

    async def update(self, ready: Ready) -> str:
        """Bring the version into force. Return a hash of the servers' checksum and the adapter's
        digest. Whole weights pause generation: no request may be sent meanwhile. After
        InfrastructureFault the weights may have changed."""
        request, begun = ready.request, time.monotonic()
        if ready.chosen == "adapter":
            await self._load_adapter(request)
            begun = time.monotonic()
        else:
            await self._load_whole(ready, self.way.servers)
        adapter, pause = request.digest if self.adapter else "", time.monotonic() - begun
        proof = hashlib.sha256(f"{self._checksum}{adapter}".encode()).hexdigest()
        told = "version %d by %s: generation paused for %.2f s, checksum %s"
        log.info(told, request.version, ready.chosen, pause, proof[:8])
        return proof

    async def refresh(self) -> None:
        """Do what the router's list says, outside of updates: let servers go that left or started
        anew, and take in each new one once it holds the version in force."""
        if (listed := await self.way.front.workers()) is None:
            raise InfrastructureFault(f"{self.way.front.url}/workers is gone: there was a router")
        await asyncio.gather(*(self._check(one, listed) for one in list(self.way.servers)))
        new = listed.keys() - {server.url for server in self.way.servers}
        await asyncio.gather(*(self._take_in(url, listed[url]) for url in new))
        self.facts = await self.way.facts()

    async def _check(self, server: Http, listed: dict[str, str]) -> None:
        reason = "the router no longer lists it"
        if server.url in listed:
            try:
                name = (await server.facts()).version
            except InfrastructureFault as fault:
                reason = f"it does not answer ({fault})"
            else:
                if name == self.named:
                    return
                reason = f"its weights are named {name!r}, not by this actor in this run"
        await self._drop(server, reason)

    async def _take_in(self, url: str, number: str) -> None:
        """Bring a server to the version in force. If it cannot be, take it out of the router, which
        would go on sending requests to it."""
        try:
            server = await self.way.reached(url)
        except InfrastructureFault:
            return  # it is still starting, or dead, which the router notices itself
        try:
            await self._join(server)
            self.way.servers.append(server)
            log.info("%s has joined with version %s", server.name, self.named.partition("@")[0])
        except InfrastructureFault as fault:
            told = "stays out until another version"
            if not isinstance(fault, UpdateRefused) and await server.answers("/model_info"):
                await self.way.front.client.send("DELETE", f"/workers/{number}")
                told = "was taken out of the router: mend it and add it again (POST /workers)"
            log.warning("%s %s: %s", server.name, told, fault)
        finally:
            if server not in self.way.servers:  # also when this actor stops meanwhile
                await server.close()

    async def _join(self, server: Http) -> None:
        checksum, tensors = await server.checksum()
        if tensors != self._tensors:
            raise InfrastructureFault(
                f"{server.name} serves another model: {len(tensors)} tensors of other names"
            )
        if checksum != self._checksum:
            if self._whole is None:
                raise InfrastructureFault(
                    f"{server.name} holds other weights (checksum {checksum[:16]}) than the model"
                    f" of the run ({self._checksum[:16]}): start it with that model"
                )
            await self._load_whole(await self.prepare(self._whole, [server]), [server])
        for name, folder in self._adapters.items():
            await server.load_adapter(name, folder)
        await server.rename(self.named)
        await server.go_on()  # an update that failed here may have left it paused

    async def unload(self, kept: int = _ADAPTERS_KEPT) -> None:
        """Unload all but the newest adapters, because servers may outlive this actor. A failure is
        only logged: an adapter costs only memory."""
        for name in list(self._adapters)[: len(self._adapters) - kept]:
            del self._adapters[name]
            for server in self.way.servers:
                try:
                    await server.unload_adapter(name)
                except InfrastructureFault as fault:
                    log.warning("adapter %s stays loaded: %s", name, fault)

    async def _load_whole(self, ready: Ready, servers: list[Http]) -> None:
        """Load and prove whole weights, into all servers or into a joining one. Generation always
        continues."""
        moved, version = False, ready.request.version
        try:
            # running requests go on with the new weights, by which their cache is computed again
            await self._each(servers, lambda server: server.pause())
            # Tokens sampled before all weights have arrived get a weight version that is not a
            # policy version.
            await self._each(servers, lambda server: server.rename(f"{MOVING}{version}"))
            pulls, folder = ready.pulls, ready.folder
            await self._each(servers, lambda s: pulls[s].take() if s in pulls else s.read(folder))
            held = await self._agreed(servers)
            if servers is self.way.servers:
                self._prove(ready.request, held)
                name = self._new_name(version)
                await self._each(servers, lambda server: server.rename(name))
                self.named = name
            elif held != self._checksum:
                raise InfrastructureFault(
                    f"{servers[0].name} holds checksum {held[:16]} after the update, the others"
                    f" {self._checksum[:16]}"
                )
            moved = True
        finally:
            await asyncio.shield(asyncio.ensure_future(self._go_on(servers, abort=not moved)))
            for pull in ready.pulls.values():
                await pull.release()

    async def _go_on(self, servers: list[Http], abort: bool) -> None:
        """Let every server generate again. abort: only log further failures."""
        steps = [lambda server: server.stop([])] if abort else []
        for step in [*steps, lambda server: server.go_on()]:
            try:
                await self._each(servers, step)
            except InfrastructureFault as fault:
                if not abort:
                    raise
                log.warning("%s", fault)

    def _prove(self, request: LoadRequest, held: str) -> None:
        """Raise InfrastructureFault unless the servers hold new weights. That these are the
        learner's, the learner's watch of log-probabilities notices."""
        if held == self._checksum and request.digest != (self._whole.digest if self._whole else ""):
            if self._whole is not None:
                raise InfrastructureFault(
                    f"{self.way.name} reports success, but its weights are those from before"
                    f" version {request.version}"
                )
            told = "version %d did not change the weights that the servers started with"
            log.warning(told, request.version)
        self._checksum, self._whole, self.adapter = held, request, ""

    async def _agreed(self, servers: list[Http]) -> str:
        """Return the common checksum, or raise. Behind a router, let differing servers go."""
        answers = await self._each(servers, lambda server: server.checksum())
        sums = [checksum for checksum, _ in answers]
        common = Counter(sums).most_common(1)[0][0] if sums else ""
        if not common:
            raise InfrastructureFault(
                f"{self.way.name} gave no checksum: is it {self.way.kind.release}?"
            )
        for server, one in list(zip(servers, sums, strict=True)):
            if one != common:
                reason = f"its weights have checksum {one[:16]}, most have {common[:16]}"
                await self._drop(server, reason)
        self._tensors = answers[sums.index(common)][1]
        return common

    async def _load_adapter(self, request: LoadRequest) -> None:
        """Load an adapter under a random name: servers outlive actors and refuse a name that they
        know."""
        name = f"coppice-v{request.version}-{uuid.uuid4().hex[:8]}"
        servers, self._adapters[name] = self.way.servers, request.path
        await self._each(servers, lambda server: server.load_adapter(name, request.path))
        await self.confirm()
        self.adapter = name

    async def confirm(self) -> None:
        """Raise InfrastructureFault unless the servers hold the whole weights of before."""
        if (held := await self._agreed(self.way.servers)) != self._checksum:
            raise InfrastructureFault(
                f"{self.way.name} holds other base weights (checksum {held[:16]}) than before"
                f" ({self._checksum[:16]}): somebody updated it. Start it with the run's model"
            )

    async def _each(self, servers: list[Http], call: Callable[[Http], Awaitable[Any]]) -> list[Any]:
        """Return every server's answer. Behind a router, a server that fails is let go if one is
        left."""
        done = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        pairs = list(zip(servers, done, strict=True))
        failed = [(server, one) for server, one in pairs if isinstance(one, BaseException)]
        for server, fault in failed:
            lasting = not self.way.elastic or len(failed) == len(done)
            if lasting or not isinstance(fault, InfrastructureFault):
                raise fault
            await self._drop(server, str(fault))
        return [one for one in done if not isinstance(one, BaseException)]

    async def _drop(self, server: Http, reason: str) -> None:
        self.way.servers.remove(server)
        log.warning("%s is left out, and taken in again when it can be: %s", server.name, reason)
        await server.close()


def choose(manifest: published.Manifest, facts: Facts, wanted: Wanted) -> Transport:
    """Return the transport of one version. Raises InfrastructureFault when the version is not
    published as the config asks."""
    memory = manifest.memory
    if manifest.kind == "lora":
        return "adapter"
    if wanted == "auto":
        gpus = memory is not None and memory.device == facts.device == "cuda"
        return "disk" if memory is None or (manifest.file and not gpus) else "distributed"
    need = "file" if wanted == "disk" else "memory"
    if not manifest.file if need == "file" else memory is None:
        raise InfrastructureFault(
            f'whole weights are to arrive by "{wanted}", but version {manifest.version} is not'
            f' published that way: set learner.publish to "{need}" or "both"'
        )
    return wanted


def _verify(base: Path, folder: Path, expected: str, held: str) -> Path:
    """Refuse what a server would not: damage, wrong shapes, missing or unknown names. Returns the
    folder that it loads. held: the digest of the whole weights that the servers have."""
    version = weights.verified(folder, expected, held)
    if version.held and not version.path.is_file():  # they came out of the learner's memory
        version = weights.verified(folder, expected)
    weights.check(version.kind, version.path, weights.BaseWeights(base).shapes)
    return weights.assembled(version)
