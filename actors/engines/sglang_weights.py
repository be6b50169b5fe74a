"""A policy version into SGLang: pause, move the weights, prove that they arrived, go on.

Every server of one engine takes part in each step, and a step that fails anywhere fails the update: no server goes on with weights that the
others do not have. Transports are in ``sglang_transport``; adapters travel alone as the small files they are.
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
"""What a server's weight version begins with while an update is on its way."""
_ADAPTERS_KEPT = 2
"""The newest adapter, and the one before, which requests that began earlier still use."""


class Refused(Exception):
    """The update was refused before anything changed."""


class Ready(msgspec.Struct, frozen=True):
    """A version that was verified and has what its transport needs. folder: of its file; scratch: that folder, where it was made here."""

    request: LoadRequest
    chosen: transport.Transport
    folder: Path
    pulls: list[transport.Pull]
    scratch: tempfile.TemporaryDirectory[str] | None
    begun: float


class Update(msgspec.Struct, frozen=True):
    """What an update moved. proof: of SGLang's own checksum of its weights, and of an adapter's digest; the same on every server."""

    transport: str
    bytes: int
    seconds: float
    pause_s: float
    proof: str


class Weights:
    """The weights of one engine's servers. ``adapter`` is the adapter that requests name ("" for none)."""

    def __init__(self, way: Way, base: Path, config: SGLangConfig):
        self.way, self.base, self.config = way, base, config
        self.adapter = ""
        self.facts = Facts()
        self._adapters: list[str] = []
        self._held = ""
        """Checksum of the whole weights that the servers hold, without adapters."""
        self._digest = ""
        """Of the version they are; "" until the first."""

    async def start(self, facts: Facts) -> None:
        """Note what the servers hold; servers that hold different weights are refused."""
        self.facts = facts
        self._held = self._agreed(await self._all("/weights_checker", {"action": "checksum"}))

    async def close(self) -> None:
        """Take this engine's adapters from servers that go on."""
        while self._adapters:
            await self._unload(self._adapters.pop())

    async def prepare(self, request: LoadRequest) -> Ready:
        """All that can be done while requests go on. Raises Refused; nothing was changed then."""
        begun, folder, scratch = time.monotonic(), Path(request.path), None
        try:
            manifest = published.read(folder, request.digest)
            chosen = transport.choose(manifest, self.facts, self.config, *transport.here(self.config, self.way))
            if chosen == "adapter" and self.facts.updated and not self._digest:
                raise InfrastructureFault(
                    f"{self.way.name} holds weight version {self.facts.version} from before, and an adapter is one of the base model's weights:"
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
        """Bring the version into force. Raises InfrastructureFault when something may have changed.

        An adapter needs no pause: requests may go on meanwhile. Whole weights pause generation, and no request may be sent until this is over.
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
        """Take adapters that no new request names from the servers. SGLang waits for requests that still use one."""
        while len(self._adapters) > _ADAPTERS_KEPT:
            await self._unload(self._adapters.pop(0))

    def _verify(self, folder: Path, expected: str) -> None:
        """The file is whole, and of this model: SGLang dies of a wrong shape, and says nothing of a missing or unknown name."""
        kind, path = weights.verified_file(folder, expected)
        weights.check(kind, path, weights.BaseWeights(self.base).shapes())

    # ------------------------------------------------------------------------------------------ whole weights

    async def _paused(self, ready: Ready) -> tuple[int, float]:
        """Bytes moved and seconds paused. Generation goes on whatever happens; after a failure running requests are aborted first."""
        begun, moved = time.monotonic(), False
        try:
            await self._all("/pause_generation", {"mode": self.config.pause})
            # What is sampled before the whole version is there bears a name that no version has.
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
        """Every server generates again. One that does not answer is told in the log: it must not hide the failure before."""
        paths = [("/abort_request", {"rid": "", "abort_all": True})] if abort else []
        for path, body in [*paths, ("/continue_generation", {})]:
            try:
                await self._all(path, body)
            except InfrastructureFault as fault:
                if not abort:
                    raise
                log.warning("%s", fault)

    async def _prove(self, ready: Ready) -> None:
        """Raises InfrastructureFault unless all servers hold the same weights, others than before, and where it can be seen, those of the file.

        On a GPU SGLang's checksum cannot be computed from a file; there the learner's watch sees weights that differ from its own.
        """
        request = ready.request
        answers = await self._all("/weights_checker", {"action": "checksum"})
        held = self._agreed(answers)
        if held == self._held and request.digest != self._digest:
            if self._digest:
                raise InfrastructureFault(
                    f"{self.way.name} reports success, but its weights are those from before version {request.version}"
                )
            log.warning("version %d left the weights as they were at the start", request.version)
        if ready.chosen in ("disk", "merged") and self.facts.device == "cpu" and self.facts.tp == 1:
            path = ready.folder / published.FILES["full"]
            for answer in answers:
                found = answer["ranks"][0]["checksums"]
                await asyncio.to_thread(_compare, path, found, _STORED.get(self.facts.dtype, ""))
        self._held, self._digest = held, request.digest

    def _agreed(self, answers: list[dict[str, Any]]) -> str:
        """SGLang's checksum of its weights. Raises InfrastructureFault unless all servers give the same."""
        found = [str(answer.get("per_engine_checksum") or "") for answer in answers]
        if len(set(found)) != 1 or not found[0]:
            listed = ", ".join(f"{s.name}: {f[:16] or 'none'}" for s, f in zip(self.way.servers, found, strict=True))
            raise InfrastructureFault(f"servers of one engine hold different weights ({listed}): start them anew")
        return found[0]

    # ------------------------------------------------------------------------------------------ adapters

    async def _adapter(self, request: LoadRequest, folder: Path) -> tuple[int, float]:
        """Load an adapter onto the weights that it was made for; requests from now on use it, running ones keep theirs.

        Its name is of this engine's life only: servers outlive actors, and refuse a name that they know. Returns bytes, and no pause.
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
        """SGLang waits for the requests that still use it; an adapter that stays costs its memory and nothing else."""
        try:
            await self._all("/unload_lora_adapter", {"lora_name": name})
        except InfrastructureFault as fault:
            log.warning("adapter %s stays loaded: %s", name, fault)

    async def _all(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The same call to every server at once; all have answered or failed when it returns or raises."""
        timeout = self.config.update_timeout_s
        return await transport.gathered(server.call(path, body, timeout) for server in self.way.servers)


_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of number types, of torch and of safetensors."""
_PADDED = ("embed_tokens", "lm_head")


def _compare(path: Path, held: dict[str, str], dtype: str) -> None:
    """Tensors that a CPU server holds as the file does must have the file's checksum. Raises InfrastructureFault.

    There SGLang's checksum of a tensor is the first eight bytes of its SHA-256. Tensors that it fuses, or wraps for adapters, have names of
    their own there and are passed over, as are those whose rows it pads.
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
