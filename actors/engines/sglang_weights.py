"""Load a policy version into SGLang: pause generation, move the weights, prove that they arrived, and continue.

Every server of one engine takes part in each step. A step that fails on any server fails the update, so that no server continues with
weights that the others do not have. Transports are in ``sglang_transport``. Adapters are small files and are loaded without a pause.
"""

import asyncio
import hashlib
import logging
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from actors.config import SGLangConfig
from actors.engines import sglang_transport as transport
from actors.engines import weights
from actors.engines.sglang_api import Facts, Way
from wire import digest, published
from wire.faults import InfrastructureFault
from wire.messages import LoadRequest

log = logging.getLogger("actors.sglang")

MOVING = "moving-"
"""The beginning of a server's weight version while an update is in progress."""
_ADAPTERS_KEPT = 2
"""The newest adapter and the previous one, which requests that began earlier still use."""


class Refused(Exception):
    """The update was refused before anything changed."""


class Ready(msgspec.Struct, frozen=True):
    """A verified version that is ready for its transport. folder: holds its file. scratch: the same folder if it was created for this update."""

    request: LoadRequest
    chosen: transport.Transport
    folder: Path
    pulls: list[transport.Pull]
    scratch: tempfile.TemporaryDirectory[str] | None
    begun: float


class Update(msgspec.Struct, frozen=True):
    """What an update moved. proof: a hash of SGLang's checksum of its weights and of the adapter's digest, the same on every server."""

    transport: str
    bytes: int
    seconds: float
    pause_s: float
    proof: str


class Weights:
    """The weights of one engine's servers: ``start``, then for each version ``prepare``, ``update`` and ``tidy``, at the end ``close``.

    ``adapter`` is the name of the adapter that requests must use ("" for none)."""

    def __init__(self, way: Way, base: Path, config: SGLangConfig):
        self.way, self.base, self.config = way, base, config
        self.adapter = ""
        self.facts = Facts()
        self._adapters: list[str] = []
        self._held = ""
        """The checksum of the whole weights that the servers hold, without adapters."""
        self._digest = ""
        """The digest of the version of these weights, "" before the first update."""

    async def start(self, facts: Facts) -> None:
        """Note the checksum of the servers' weights. Raises InfrastructureFault when the servers hold different weights."""
        self.facts = facts
        self._held = self._agreed(await self._all("/weights_checker", {"action": "checksum"}))

    async def close(self) -> None:
        """Unload this engine's adapters, because the servers may outlive this actor."""
        while self._adapters:
            await self._unload(self._adapters.pop())

    async def prepare(self, request: LoadRequest) -> Ready:
        """Do everything that can be done while requests go on. Raises Refused, and then nothing was changed."""
        begun, folder, scratch = time.monotonic(), Path(request.path), None
        try:
            manifest = published.read(folder, request.digest)
            chosen = transport.choose(manifest, self.facts, self.config, *transport.here(self.config, self.way))
            if chosen == "adapter" and self.facts.updated and not self._digest:
                raise InfrastructureFault(
                    f"{self.way.name} holds weight version {self.facts.version} from before, but an adapter needs the base model's weights:"
                    " start it anew"
                )
            if chosen in ("adapter", "disk", "merged"):
                await asyncio.to_thread(self._verify, folder, request.digest)
            if chosen == "merged":
                scratch = await asyncio.to_thread(transport.merge, self.base, folder)
                folder = Path(scratch.name)
            pulls = await transport.prepare(chosen, self.way, manifest, self.config)
        except (InfrastructureFault, ValueError, OSError) as fault:
            raise Refused(str(fault)) from None
        return Ready(request, chosen, folder, pulls, scratch, begun)

    async def update(self, ready: Ready) -> Update:
        """Bring the version into force. Raises InfrastructureFault, and then the weights may have changed.

        An adapter needs no pause, and requests may go on meanwhile. Whole weights pause generation; no request may be sent until this returns.
        """
        request, chosen = ready.request, ready.chosen
        try:
            size, pause = (
                await self._adapter(request, ready.folder) if chosen == "adapter" else await self._paused(ready)
            )
        finally:
            if ready.scratch is not None:
                ready.scratch.cleanup()
        seconds = time.monotonic() - ready.begun
        proof = hashlib.sha256(f"{self._held}{request.digest if self.adapter else ''}".encode()).hexdigest()
        log.info(
            "version %d by %s: %.1f MB in %.2f s (%.0f MB/s), generation paused for %.2f s, checksum %s",
            request.version, chosen, size / 1e6, seconds, size / 1e6 / seconds, pause, proof[:16],
        )  # fmt: skip
        return Update(chosen, size, seconds, pause, proof)

    async def tidy(self) -> None:
        """Unload adapters that no new request uses. SGLang waits for the requests that still use such an adapter."""
        while len(self._adapters) > _ADAPTERS_KEPT:
            await self._unload(self._adapters.pop(0))

    def _verify(self, folder: Path, expected: str) -> None:
        """Refuse a damaged file and weights of another model. SGLang would die of a wrong shape and ignore a missing or unknown name."""
        kind, path = weights.verified_file(folder, expected)
        weights.check(kind, path, weights.BaseWeights(self.base).shapes())

    # ------------------------------------------------------------------------------------------ whole weights

    async def _paused(self, ready: Ready) -> tuple[int, float]:
        """Return the bytes moved and the seconds paused. Generation always continues; after a failure the running requests are aborted first."""
        begun, moved = time.monotonic(), False
        try:
            await self._all("/pause_generation", {"mode": self.config.pause})
            # Tokens sampled before all weights have arrived get a weight version that is not a policy version.
            between = {"new_version": f"{MOVING}{ready.request.version}", "abort_all_requests": False}
            await self._all("/update_weight_version", between)
            size = await transport.move(
                ready.chosen, self.way, ready.folder, ready.request.version, self.config, ready.pulls
            )
            await self._prove(ready)
            moved = True
        finally:
            await asyncio.shield(asyncio.ensure_future(self._go_on(abort=not moved)))
            if not moved:
                for pull in ready.pulls:
                    await pull.release()
        self.adapter = ""
        return size, time.monotonic() - begun

    async def _go_on(self, abort: bool) -> None:
        """Let every server generate again. After a failed update, further failures are only logged, so that they do not hide the first."""
        paths = [("/abort_request", {"rid": "", "abort_all": True})] if abort else []
        for path, body in [*paths, ("/continue_generation", {})]:
            try:
                await self._all(path, body)
            except InfrastructureFault as fault:
                if not abort:
                    raise
                log.warning("%s", fault)

    async def _prove(self, ready: Ready) -> None:
        """Raises InfrastructureFault unless all servers hold the same new weights and, for a file on a CPU, those of the file.

        On a GPU SGLang's checksum cannot be computed from a file. There, the learner's watch notices weights that differ from its own.
        """
        request = ready.request
        answers = await self._all("/weights_checker", {"action": "checksum"})
        held = self._agreed(answers)
        if held == self._held and request.digest != self._digest:
            if self._digest:
                raise InfrastructureFault(
                    f"{self.way.name} reports success, but its weights are those from before version {request.version}"
                )
            log.warning("version %d did not change the weights that the servers started with", request.version)
        if ready.chosen in ("disk", "merged") and self.facts.device == "cpu" and self.facts.tp == 1:
            path = ready.folder / published.FILES["full"]
            for answer in answers:
                checksums = answer["ranks"][0]["checksums"]
                await asyncio.to_thread(_compare, path, checksums, _STORED.get(self.facts.dtype, ""))
        self._held, self._digest = held, request.digest

    def _agreed(self, answers: list[dict[str, Any]]) -> str:
        """Return SGLang's checksum of its weights. Raises InfrastructureFault unless all servers report the same checksum."""
        sums = [str(answer.get("per_engine_checksum") or "") for answer in answers]
        if len(set(sums)) != 1 or not sums[0]:
            listed = ", ".join(f"{s.name}: {one[:16] or 'none'}" for s, one in zip(self.way.servers, sums, strict=True))
            raise InfrastructureFault(f"servers of one engine hold different weights ({listed}): start them anew")
        return sums[0]

    # ------------------------------------------------------------------------------------------ adapters

    async def _adapter(self, request: LoadRequest, folder: Path) -> tuple[int, float]:
        """Load an adapter onto its base weights. New requests use it, running requests keep theirs. Return the bytes and a pause of 0 seconds.

        The adapter's name is random, because servers outlive actors and refuse a name that they already know.
        """
        size = (folder / published.FILES["lora"]).stat().st_size
        name = f"coppice-v{request.version}-{uuid.uuid4().hex[:8]}"
        self._adapters.append(name)
        await self._all("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        held = self._agreed(await self._all("/weights_checker", {"action": "checksum"}))
        if held != self._held:
            raise InfrastructureFault(
                f"{self.way.name} holds other base weights (checksum {held[:16]}) than when this actor last saw them ({self._held[:16]}): was"
                " it started anew with another model, or updated by somebody else? Start it with the run's model, then this actor"
            )
        self.adapter = name
        return size, 0.0

    async def _unload(self, name: str) -> None:
        """Unload an adapter; SGLang first waits for the requests that use it. A failure is only logged, since an adapter costs only memory."""
        try:
            await self._all("/unload_lora_adapter", {"lora_name": name})
        except InfrastructureFault as fault:
            log.warning("adapter %s stays loaded: %s", name, fault)

    async def _all(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Make the same call to every server at once. All have answered or failed when this returns or raises."""
        timeout = self.config.update_timeout_s
        return await transport.gathered(server.call(path, body, timeout) for server in self.way.servers)


_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The name of a number type in safetensors, by its name in torch."""
_PADDED = ("embed_tokens", "lm_head")


def _compare(path: Path, held: dict[str, str], dtype: str) -> None:
    """Raises InfrastructureFault unless the tensors that a CPU server holds under the file's names have the file's checksums.

    On a CPU, SGLang's checksum of a tensor is the first eight bytes of its SHA-256. Tensors that SGLang fuses or wraps for adapters have
    other names and are skipped. Tensors whose rows it pads are also skipped.
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
        raise InfrastructureFault(f"{len(wrong)} tensors did not arrive as {path} holds them; the first: {wrong[0]}")
