"""Load a policy version into SGLang: pause generation, move the weights, prove that they arrived,
name them, and continue.

Every server of one engine takes part in each step. A step that fails on any server fails the
update, so that no server continues with weights that the others do not have. Behind a router a
server that fails is let go instead while another is left, and ``join`` brings a server to the
version of the others while they generate. The name that a server then gives to its weights, in
every sample, holds a mark of this actor, and a server gets it only after the proof: samples of
weights that anybody else loaded are known by it. Transports are in ``sglang_transport``. Adapters
are small files and are loaded without a pause.
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
from coppice.actors.engines.sglang_api import Facts, Way
from coppice.wire import digest, published
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import LoadRequest

log = logging.getLogger("actors.sglang")

MOVING = "moving-"
"""The beginning of a server's weight version while an update is in progress."""
_ADAPTERS_KEPT = 2
"""The newest adapter and the previous one, which requests that began earlier still use."""


class Refused(Exception):
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


class Update(msgspec.Struct, frozen=True):
    """What an update moved. proof: a hash of SGLang's checksum of its weights and of the adapter's
    digest, the same on every server."""

    transport: str
    bytes: int
    seconds: float
    pause_s: float
    proof: str


class Weights:
    """The weights of one engine's servers: ``start``, then for each version ``prepare``, ``update``
    and ``tidy``, at the end ``close``.

    ``adapter`` is the name of the adapter that requests must use ("" for none)."""

    def __init__(self, way: Way, base: Path, config: SGLangConfig):
        self.way, self.base, self.config = way, base, config
        self.adapter = ""
        self.facts = Facts()
        self.named = ""
        """The name of the whole weights in force."""
        self._labels: dict[str, int] = {}
        self._whole: LoadRequest | None = None
        """The last version of whole weights, None before the first update."""
        self._adapters: dict[str, Path] = {}
        self._held = ""
        """The checksum of the whole weights that the servers hold, without adapters."""
        self._tensors: frozenset[str] = frozenset()
        """The names of these weights' tensors in SGLang."""

    async def start(self) -> None:
        """Note and name the servers' weights. Raises InfrastructureFault when the servers hold
        different weights."""
        servers = self.way.servers
        self._held = self._agreed(
            servers, await self._all(servers, "/weights_checker", {"action": "checksum"})
        )
        self.facts = await self.way.facts()
        if not self.facts.updated:
            await self._name(servers, label := self._label(0))
            self.named = label

    def given(self, label: Any) -> int:
        """Return when this actor gave this name to weights that it had proven: 0, 1, ...; -1 if it
        never did."""
        return self._labels.get(label, -1) if isinstance(label, str) else -1

    def _label(self, version: int) -> str:
        """Return a new name for a version's weights, which begins with its number. No name is used
        twice."""
        label = f"{version}@{uuid.uuid4().hex[:12]}"
        self._labels[label] = len(self._labels)
        return label

    async def close(self) -> None:
        """Unload this engine's adapters, because the servers may outlive this actor."""
        for name in list(self._adapters):
            await self._unload(name)

    async def prepare(
        self,
        request: LoadRequest,
        servers: list[Any] | None = None,
        config: SGLangConfig | None = None,
    ) -> Ready:
        """Do everything that can be done while requests go on. Raises Refused, and then nothing was
        changed."""
        servers, config = servers or self.way.servers, config or self.config
        begun, folder, scratch, pulls = time.monotonic(), Path(request.path), None, {}
        try:
            manifest = published.read(folder, request.digest)
            chosen = transport.choose(
                manifest, self.facts, config, *transport.here(config, servers)
            )
            if chosen == "adapter" and self.facts.updated and self._whole is None:
                raise InfrastructureFault(
                    f"{self.way.name} holds weight version {self.facts.version} from before, but an adapter needs the base model's weights:"
                    " start it anew"
                )
            if chosen in ("adapter", "disk", "merged"):
                await asyncio.to_thread(self._verify, folder, request.digest)
            if chosen == "merged":
                scratch = await asyncio.to_thread(transport.merge, self.base, folder)
                folder = Path(scratch.name)
            if chosen in ("tensor", "distributed"):
                facts = await self._each(servers, lambda server: server.facts())
                pulls = await transport.prepare(
                    chosen, dict(zip(servers, facts, strict=True)), manifest, config
                )
        except (InfrastructureFault, ValueError, OSError) as fault:
            raise Refused(str(fault)) from None
        return Ready(request, chosen, folder, pulls, scratch, begun)

    async def update(self, ready: Ready) -> Update:
        """Bring the version into force. Raises InfrastructureFault, and then the weights may have
        changed.

        An adapter needs no pause, and requests may go on meanwhile. Whole weights pause generation;
        no request may be sent until this returns.
        """
        request, chosen = ready.request, ready.chosen
        try:
            size, pause = (
                await self._adapter(request, ready.folder)
                if chosen == "adapter"
                else await self._paused(ready, self.way.servers, self.config)
            )
        finally:
            if ready.scratch is not None:
                ready.scratch.cleanup()
        seconds = time.monotonic() - ready.begun
        proof = hashlib.sha256(
            f"{self._held}{request.digest if self.adapter else ''}".encode()
        ).hexdigest()
        log.info(
            "version %d by %s: %.1f MB in %.2f s (%.0f MB/s), generation paused for %.2f s, checksum %s",
            request.version, chosen, size / 1e6, seconds, size / 1e6 / seconds, pause, proof[:16],
        )  # fmt: skip
        return Update(chosen, size, seconds, pause, proof)

    async def join(self, server: Any) -> str:
        """Bring a server that came behind the router to the version in force, while the others
        generate, and return how in words.

        Raises Refused when the version cannot be had any more, and InfrastructureFault when the
        server cannot be brought to it.
        """
        found, how = await self._sums(server), "it holds it"
        if set(found[1]) != self._tensors:
            raise InfrastructureFault(
                f"{server.name} serves another model: {len(found[1])} tensors of other names"
            )
        if self._whole is not None and found[0] != self._held:
            # What it has cached is of other weights and must go, whatever ``pause`` says.
            config = msgspec.structs.replace(self.config, pause="retract")
            ready = await self.prepare(self._whole, [server], config)
            try:
                await self._paused(ready, [server], config)
            finally:
                if ready.scratch is not None:
                    ready.scratch.cleanup()
            how = f"by {ready.chosen}"
        elif found[0] != self._held:
            raise InfrastructureFault(
                f"{server.name} holds other weights (checksum {found[0][:16]}) than the model of the run ({self._held[:16]}): start it with that model"
            )
        for name, folder in self._adapters.items():
            await self._all(
                [server], "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
            )
        await self._name([server], self.named)
        # an update that failed here may have left it paused
        await self._all([server], "/continue_generation", {})
        return how

    async def tidy(self) -> None:
        """Unload adapters that no new request uses. SGLang waits for the requests that still use
        such an adapter."""
        for name in list(self._adapters)[:-_ADAPTERS_KEPT]:
            await self._unload(name)

    def _verify(self, folder: Path, expected: str) -> None:
        """Refuse a damaged file and weights of another model. SGLang would die of a wrong shape and
        ignore a missing or unknown name."""
        kind, path = weights.verified_file(folder, expected)
        weights.check(kind, path, weights.BaseWeights(self.base).shapes())

    # ------------------------------------------------------------------------------------------
    # whole weights

    async def _paused(
        self, ready: Ready, servers: list[Any], config: SGLangConfig
    ) -> tuple[int, float]:
        """Return the bytes moved and the seconds paused. Generation always continues; after a
        failure the running requests are aborted first."""
        begun, moved, joining = time.monotonic(), False, servers is not self.way.servers
        try:
            await self._all(servers, "/pause_generation", {"mode": config.pause})
            # Tokens sampled before all weights have arrived get a weight version that is not a
            # policy version.
            await self._name(servers, f"{MOVING}{ready.request.version}")
            sizes = await self._each(
                servers,
                lambda server: transport.move(
                    server, ready.folder, config, ready.pulls.get(server)
                ),
            )
            await self._prove(ready, servers, joining)
            label = self.named if joining else self._label(ready.request.version)
            await self._name(servers, label)
            self.named, moved = label, True
        finally:
            await asyncio.shield(asyncio.ensure_future(self._go_on(servers, abort=not moved)))
            for server, pull in ready.pulls.items():
                if not moved or server not in servers:
                    await pull.release()
        return max(sizes), time.monotonic() - begun

    async def _go_on(self, servers: list[Any], abort: bool) -> None:
        """Let every server generate again. After a failed update, further failures are only logged,
        so that they do not hide the first."""
        paths = [("/abort_request", {"rid": "", "abort_all": True})] if abort else []
        for path, body in [*paths, ("/continue_generation", {})]:
            try:
                await self._all(servers, path, body)
            except InfrastructureFault as fault:
                if not abort:
                    raise
                log.warning("%s", fault)

    async def _name(self, servers: list[Any], label: str) -> None:
        """Give a name to the weights that the servers hold."""
        await self._all(
            servers, "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )

    async def _prove(self, ready: Ready, servers: list[Any], joining: bool) -> None:
        """Raises InfrastructureFault unless all servers hold the same new weights and, for a file
        on a CPU, those of the file.

        On a GPU SGLang's checksum cannot be computed from a file. There, the learner's watch
        notices weights that differ from its own.
        """
        request = ready.request
        answers = await self._all(servers, "/weights_checker", {"action": "checksum"})
        held = self._agreed(servers, answers)
        if joining:
            if held != self._held:
                raise InfrastructureFault(
                    f"{servers[0].name} holds checksum {held[:16]} after the update, the others {self._held[:16]}"
                )
            return
        if held == self._held and request.digest != (self._whole.digest if self._whole else ""):
            if self._whole is not None:
                raise InfrastructureFault(
                    f"{self.way.name} reports success, but its weights are those from before version {request.version}"
                )
            log.warning(
                "version %d did not change the weights that the servers started with",
                request.version,
            )
        if ready.chosen in ("disk", "merged") and self.facts.device == "cpu" and self.facts.tp == 1:
            path = ready.folder / published.FILES["full"]
            for answer in answers:
                checksums = answer["ranks"][0]["checksums"]
                await asyncio.to_thread(
                    _compare, path, checksums, _STORED.get(self.facts.dtype, "")
                )
        self._held, self._whole, self.adapter = held, request, ""

    async def _sums(self, server: Any) -> tuple[str, dict[str, str]]:
        """Return a server's checksum of all its weights, and those of its tensors by name."""
        (answer,) = await self._all([server], "/weights_checker", {"action": "checksum"})
        return _checksum(answer), _tensors(answer)

    def _agreed(self, servers: list[Any], answers: list[dict[str, Any]]) -> str:
        """Return SGLang's checksum of its weights. Raises InfrastructureFault unless all servers
        report the same checksum.

        Behind a router the servers that differ from most are let go."""
        sums = [_checksum(answer) for answer in answers]
        common = Counter(sums).most_common(1)[0][0] if sums else ""
        if not common or (len(set(sums)) != 1 and not self.way.elastic):
            listed = ", ".join(
                f"{s.name}: {one[:16] or 'none'}" for s, one in zip(servers, sums, strict=True)
            )
            raise InfrastructureFault(
                f"servers of one engine hold different weights ({listed}): start them anew"
            )
        for server, one in list(zip(servers, sums, strict=True)):
            if one != common:
                _lose(
                    servers,
                    server,
                    f"its weights have checksum {one[:16]}, most have {common[:16]}",
                )
        self._tensors = frozenset(_tensors(answers[sums.index(common)]))
        return common

    # ------------------------------------------------------------------------------------------
    # adapters

    async def _adapter(self, request: LoadRequest, folder: Path) -> tuple[int, float]:
        """Load an adapter onto its base weights. New requests use it, running requests keep theirs.
        Return the bytes and a pause of 0 seconds.

        The adapter's name is random, because servers outlive actors and refuse a name that they
        already know.
        """
        size = (folder / published.FILES["lora"]).stat().st_size
        name = f"coppice-v{request.version}-{uuid.uuid4().hex[:8]}"
        servers, self._adapters[name] = self.way.servers, folder
        await self._all(
            servers, "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        )
        held = self._agreed(
            servers, await self._all(servers, "/weights_checker", {"action": "checksum"})
        )
        if held != self._held:
            raise InfrastructureFault(
                f"{self.way.name} holds other base weights (checksum {held[:16]}) than when this actor last saw them ({self._held[:16]}): was"
                " it started anew with another model, or updated by somebody else? Start it with the run's model, then this actor"
            )
        self.adapter = name
        return size, 0.0

    async def _unload(self, name: str) -> None:
        """Unload an adapter; SGLang first waits for the requests that use it. A failure is only
        logged, since an adapter costs only memory."""
        del self._adapters[name]
        body = {"lora_name": name}
        try:
            await transport.gathered(
                server.call("/unload_lora_adapter", body, self.config.update_timeout_s)
                for server in self.way.servers
            )
        except InfrastructureFault as fault:
            log.warning("adapter %s stays loaded: %s", name, fault)

    async def _all(
        self, servers: list[Any], path: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Make the same call to every server at once, see ``_each``."""
        return await self._each(
            servers, lambda server: server.call(path, body, self.config.update_timeout_s)
        )

    async def _each(self, servers: list[Any], call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """Return the answers of all servers, called at once. All have answered or failed when this
        returns or raises.

        Behind a router a server that fails is let go (removed from ``servers``) while another is
        left."""
        done = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        failed = {
            server: one
            for server, one in zip(servers, done, strict=True)
            if isinstance(one, BaseException)
        }
        for server, fault in failed.items():
            if (
                not self.way.elastic
                or len(failed) == len(done)
                or not isinstance(fault, InfrastructureFault)
            ):
                raise fault
            _lose(servers, server, str(fault))
        return [one for one in done if not isinstance(one, BaseException)]


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
    """Raises InfrastructureFault unless the tensors that a CPU server holds under the file's names
    have the file's checksums.

    On a CPU, SGLang's checksum of a tensor is the first eight bytes of its SHA-256. Tensors that
    SGLang fuses or wraps for adapters have other names and are skipped. Tensors whose rows it pads
    are also skipped.
    """
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
