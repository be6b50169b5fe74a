"""Load a policy version into SGLang: pause generation, move the weights, prove that they arrived,
name them, and continue. Adapters are small files and are loaded without a pause.

Every server of one engine takes part in each step, and a step that fails on any server fails the
update. Behind a router a server that fails is let go instead while another is left, and ``join``
brings a server to the version of the others while they generate. A server gets the name of a
version, which holds a mark of this actor, only after the proof; SGLang reports the name with every
sample, so samples of weights that anybody else loaded are known by it.
"""

import asyncio
import hashlib
import logging
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.config import SGLangConfig
from coppice.actors.engines import sglang_transport as transport
from coppice.actors.engines import weights
from coppice.actors.engines.sglang_api import Facts, Remote, Way
from coppice.wire import digest, published
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import LoadRequest

log = logging.getLogger("actors.sglang")

MOVING = "moving-"
"""The beginning of a server's weight version while an update is in progress."""
_CHECKSUMS = "/weights_checker", {"action": "checksum"}
_ADAPTERS_KEPT = 2
"""The newest adapter and the previous one, which requests that began earlier still use."""


class UpdateRefused(Exception):
    """The update was refused before anything changed."""


class Ready(msgspec.Struct, frozen=True):
    """A verified version that is ready for its transport. folder: holds its file. pulls: by server.
    scratch: the same folder if it was created for this update."""

    request: LoadRequest
    chosen: transport.Transport
    folder: Path
    pulls: dict[Any, transport.Pull]
    scratch: tempfile.TemporaryDirectory[str] | None
    begun: float

    def clean_up(self) -> None:
        """Remove the folder that was created for this update."""
        if self.scratch is not None:
            self.scratch.cleanup()


class SGLangWeights:
    """The weights of one engine's servers: ``start``, then for each version ``prepare``, ``update``
    and ``unload``. adapter: the adapter of new requests, "" for none. named: the whole
    weights in force."""

    def __init__(self, way: Way, base: Path, config: SGLangConfig):
        self.way, self.base, self.config = way, base, config
        self.adapter, self.named = "", ""
        self.facts = Facts()
        self._names: dict[str, int] = {}
        self._whole: LoadRequest | None = None
        """The last version of whole weights, None before the first update."""
        self._adapters: dict[str, Path] = {}
        self._checksum = ""
        """The checksum of the whole weights that the servers hold, without adapters."""
        self._tensors: frozenset[str] = frozenset()
        """The names of these weights' tensors in SGLang."""

    async def start(self) -> None:
        """Name the servers' weights. Raises InfrastructureFault when they differ."""
        servers = self.way.servers
        self._checksum, _ = await self._agreed(servers)
        self.facts = await self.way.facts()
        if not self.facts.updated:
            self.named = self._new_name(0)
            await self._name(servers, self.named)

    def order(self, name: Any) -> int:
        """Return when this actor gave this name: 0, 1, ...; -1 for any other name."""
        return self._names.get(name, -1) if isinstance(name, str) else -1

    def _new_name(self, version: int) -> str:
        """Return a name for a version's weights, which begins with its number and is used once."""
        name = f"{version}@{uuid.uuid4().hex[:12]}"
        self._names[name] = len(self._names)
        return name

    async def prepare(
        self,
        request: LoadRequest,
        servers: list[Any] | None = None,
        config: SGLangConfig | None = None,
    ) -> Ready:
        """Do all that can be done while requests go on. Raises UpdateRefused."""
        servers, config = servers or self.way.servers, config or self.config
        begun, folder, scratch, pulls = time.monotonic(), Path(request.path), None, {}
        try:
            manifest = published.read(folder, request.digest)
            chosen = transport.choose(
                manifest, self.facts, config, *transport.place(config, servers)
            )
            if chosen == "adapter" and self.facts.updated and self._whole is None:
                raise InfrastructureFault(
                    f"{self.way.name} holds weight version {self.facts.version} from before, but an"
                    " adapter needs the base model's weights: start it anew"
                )
            if chosen in ("adapter", "disk", "merged"):
                await asyncio.to_thread(_verify, self.base, folder, request.digest)
            if chosen == "merged":
                scratch = await asyncio.to_thread(transport.merge, self.base, folder)
                folder = Path(scratch.name)
            if chosen in ("tensor", "distributed"):
                facts = await self._each(servers, lambda server: server.facts())
                pulls = await transport.prepare(
                    chosen, dict(zip(servers, facts, strict=True)), manifest, config
                )
        except (InfrastructureFault, ValueError, OSError) as fault:
            raise UpdateRefused(str(fault)) from None
        return Ready(request, chosen, folder, pulls, scratch, begun)

    async def update(self, ready: Ready) -> tuple[int, str]:
        """Bring the version into force. Return the bytes that were moved and a hash of SGLang's
        checksum and the adapter's digest. Whole weights pause generation: no request may be sent
        meanwhile. After InfrastructureFault the weights may have changed."""
        request, chosen, pause = ready.request, ready.chosen, 0.0
        try:
            if chosen == "adapter":
                size = await self._load_adapter(request, ready.folder)
            else:
                size, pause = await self._load_whole(ready, self.way.servers, self.config)
        finally:
            ready.clean_up()
        seconds = time.monotonic() - ready.begun
        adapter, mb = request.digest if self.adapter else "", size / 1e6
        proof = hashlib.sha256(f"{self._checksum}{adapter}".encode()).hexdigest()
        log.info(
            f"version {request.version} by {chosen}: {mb:.1f} MB in {seconds:.2f} s"
            f" ({mb / seconds:.0f} MB/s), generation paused for {pause:.2f} s, checksum {proof[:8]}"
        )
        return size, proof

    async def join(self, server: Any) -> str:
        """Bring a new server to the version in force; say how. Raises UpdateRefused or a fault."""
        (answer,) = await self._all([server], *_CHECKSUMS)
        checksum, tensors, how = _checksum(answer), _tensors(answer), "it holds it"
        if set(tensors) != self._tensors:
            raise InfrastructureFault(
                f"{server.name} serves another model: {len(tensors)} tensors of other names"
            )
        if checksum != self._checksum:
            if self._whole is None:
                raise InfrastructureFault(
                    f"{server.name} holds other weights (checksum {checksum[:16]}) than the model"
                    f" of the run ({self._checksum[:16]}): start it with that model"
                )
            # What it has cached is of other weights and must go, whatever ``pause`` says.
            config = msgspec.structs.replace(self.config, pause="retract")
            ready = await self.prepare(self._whole, [server], config)
            try:
                await self._load_whole(ready, [server], config)
            finally:
                ready.clean_up()
            how = f"by {ready.chosen}"
        for name, folder in self._adapters.items():
            adapter = {"lora_name": name, "lora_path": str(folder)}
            await self._all([server], "/load_lora_adapter", adapter)
        await self._name([server], self.named)
        # an update that failed here may have left it paused
        await self._all([server], "/continue_generation", {})
        return how

    async def unload(self, kept: int = _ADAPTERS_KEPT) -> None:
        """Unload all but the newest adapters, because servers may outlive this actor. A failure is
        only logged: an adapter costs only memory."""
        for name in list(self._adapters)[: len(self._adapters) - kept]:
            del self._adapters[name]
            for server in self.way.servers:
                try:
                    await self._all([server], "/unload_lora_adapter", {"lora_name": name})
                except InfrastructureFault as fault:
                    log.warning("adapter %s stays loaded: %s", name, fault)

    async def _load_whole(
        self, ready: Ready, servers: list[Any], config: SGLangConfig
    ) -> tuple[int, float]:
        """Return bytes moved and seconds paused. Generation always continues."""
        begun, moved, joining = time.monotonic(), False, servers is not self.way.servers
        try:
            await self._all(servers, "/pause_generation", {"mode": config.pause})
            # Tokens sampled before all weights have arrived get a weight version that is not a
            # policy version.
            await self._name(servers, f"{MOVING}{ready.request.version}")
            sizes = await self._each(servers, lambda server: self._move(server, ready, config))
            await self._prove(ready, servers, joining)
            name = self.named if joining else self._new_name(ready.request.version)
            await self._name(servers, name)
            self.named, moved = name, True
        finally:
            await asyncio.shield(asyncio.ensure_future(self._go_on(servers, abort=not moved)))
            for server, pull in ready.pulls.items():
                if not moved or server not in servers:
                    await pull.release()
        return max(sizes), time.monotonic() - begun

    async def _move(self, server: Any, ready: Ready, config: SGLangConfig) -> int:
        """Move the weights into a server whose generation pauses, and return their bytes."""
        if pull := ready.pulls.get(server):
            return await pull.take()
        body = {"model_path": str(ready.folder), "flush_cache": config.pause == "retract"}
        await server.call("/update_weights_from_disk", body, config.update_timeout_s)
        return sum(path.stat().st_size for path in ready.folder.glob("*.safetensors"))

    async def _go_on(self, servers: list[Any], abort: bool) -> None:
        """Let every server generate again. abort: only log further failures."""
        paths = [("/abort_request", {"rid": "", "abort_all": True})] if abort else []
        for path, body in [*paths, ("/continue_generation", {})]:
            try:
                await self._all(servers, path, body)
            except InfrastructureFault as fault:
                if not abort:
                    raise
                log.warning("%s", fault)

    async def _name(self, servers: list[Any], name: str) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        await self._all(servers, "/update_weight_version", body)

    async def _prove(self, ready: Ready, servers: list[Any], joining: bool) -> None:
        """Raise InfrastructureFault unless all servers hold the same new weights and, for a file on
        a CPU, those of the file. On a GPU the learner's watch notices other weights."""
        request = ready.request
        held, answers = await self._agreed(servers)
        if joining:
            if held != self._checksum:
                raise InfrastructureFault(
                    f"{servers[0].name} holds checksum {held[:16]} after the update, the others"
                    f" {self._checksum[:16]}"
                )
            return
        if held == self._checksum and request.digest != (self._whole.digest if self._whole else ""):
            if self._whole is not None:
                raise InfrastructureFault(
                    f"{self.way.name} reports success, but its weights are those from before"
                    f" version {request.version}"
                )
            log.warning(
                "version %d did not change the weights that the servers started with",
                request.version,
            )
        if ready.chosen in ("disk", "merged") and self.facts.device == "cpu" and self.facts.tp == 1:
            path = ready.folder / published.FILES["full"]
            dtype = _STORED.get(self.facts.dtype, "")
            for answer in answers:
                await asyncio.to_thread(_compare, path, _tensors(answer), dtype)
        self._checksum, self._whole, self.adapter = held, request, ""

    async def _agreed(self, servers: list[Any]) -> tuple[str, list[dict[str, Any]]]:
        """Return the common checksum and all answers, or raise. Behind a router, let differing
        servers go."""
        answers = await self._all(servers, *_CHECKSUMS)
        sums = [_checksum(answer) for answer in answers]
        common = Counter(sums).most_common(1)[0][0] if sums else ""
        pairs = list(zip(servers, sums, strict=True))
        if not common or (len(set(sums)) != 1 and not self.way.elastic):
            listed = ", ".join(f"{server.name}: {one[:16] or 'none'}" for server, one in pairs)
            raise InfrastructureFault(
                f"servers of one engine hold different weights ({listed}): start them anew"
            )
        for server, one in pairs:
            if one != common:
                reason = f"its weights have checksum {one[:16]}, most have {common[:16]}"
                _lose(servers, server, reason)
        self._tensors = frozenset(_tensors(answers[sums.index(common)]))
        return common, answers

    async def _load_adapter(self, request: LoadRequest, folder: Path) -> int:
        """Load an adapter under a random name and return its bytes. Servers outlive actors and
        refuse a name that they know."""
        size = (folder / published.FILES["lora"]).stat().st_size
        name = f"coppice-v{request.version}-{uuid.uuid4().hex[:8]}"
        servers, self._adapters[name] = self.way.servers, folder
        adapter = {"lora_name": name, "lora_path": str(folder)}
        await self._all(servers, "/load_lora_adapter", adapter)
        held, _ = await self._agreed(servers)
        if held != self._checksum:
            raise InfrastructureFault(
                f"{self.way.name} holds other base weights (checksum {held[:16]}) than when this"
                f" actor last saw them ({self._checksum[:16]}): was it started anew with another"
                " model, or updated by somebody else? Start it with the run's model"
            )
        self.adapter = name
        return size

    async def _all(self, servers: list[Any], path: str, body: dict[str, Any]) -> list[Any]:
        """Make the same call to every server at once, see ``_each``."""
        limit = self.config.update_timeout_s
        return await self._each(servers, lambda server: server.call(path, body, limit))

    async def _each(self, servers: list[Any], call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """Return all answers. Behind a router, a server that fails is let go if one is left."""
        done = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        pairs = list(zip(servers, done, strict=True))
        failed = [(server, one) for server, one in pairs if isinstance(one, BaseException)]
        for server, fault in failed:
            lasting = not self.way.elastic or len(failed) == len(done)
            if lasting or not isinstance(fault, InfrastructureFault):
                raise fault
            _lose(servers, server, str(fault))
        return [one for one in done if not isinstance(one, BaseException)]


class SGLangFleet:
    """The servers behind a router during a run, which the router lists (``GET /workers``). ``look``
    must not run while weights are loaded.

    listed --reached, brought to the version, proven--> generating (in ``Remote.servers``)
    listed --answers, but cannot be brought to the version--> taken out of the router
    generating --unlisted, silent, or restarted--> gone
    """

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
            if not await server.answers("/model_info"):
                return
            self._refused[number] = self.weights.named
            try:  # the router would go on sending requests to it
                await self.way.front.remove(number)
                done = "was taken out of the router: mend it and add it again (POST /workers)"
            except InfrastructureFault as refusal:
                done = f"must be taken out of the router (DELETE /workers/{number}: {refusal})"
            log.warning(
                "%s cannot be brought to the weights in force and %s: %s", server.name, done, fault
            )
        else:
            self.way.servers.append(server)
            version = self.weights.named.partition("@")[0]
            log.info("%s has joined with version %s (%s)", server.name, version, how)
        finally:
            if server not in self.way.servers:  # also when this actor stops meanwhile
                await server.close()


def _verify(base: Path, folder: Path, expected: str) -> None:
    """Refuse what SGLang would not: damage, wrong shapes, missing or unknown names."""
    kind, path = weights.verified_file(folder, expected)
    weights.check(kind, path, weights.BaseWeights(base).shapes)


def _lose(servers: list[Any], server: Any, reason: str) -> None:
    servers.remove(server)
    log.warning("%s is left out, and taken in again when it can be: %s", server.name, reason)


def _checksum(answer: dict[str, Any]) -> str:
    return str(answer.get("per_engine_checksum") or "")


def _tensors(answer: dict[str, Any]) -> dict[str, str]:
    """Return the checksums of the tensors by name, of the first rank."""
    ranks = answer.get("ranks") or [{}]
    return ranks[0].get("checksums") or {}


_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The name of a number type in safetensors, by its name in torch."""
_PADDED = ("embed_tokens", "lm_head")


def _compare(path: Path, held: dict[str, str], dtype: str) -> None:
    """Raise InfrastructureFault unless a CPU server's tensors have the file's checksums (eight
    bytes of SHA-256). Tensors that SGLang fuses, wraps or pads are skipped."""
    wrong = [
        name
        for name, stored, _, data in digest.each(path)
        if name in held
        and stored == dtype
        and not any(part in name for part in _PADDED)
        and hashlib.sha256(data).digest()[:8].hex() != held[name]
    ]
    if wrong:
        raise InfrastructureFault(
            f"{len(wrong)} tensors did not arrive as {path} holds them; the first: {wrong[0]}"
        )
