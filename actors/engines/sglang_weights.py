"""A policy version into SGLang: pause, move the weights, prove that they arrived, go on.

Every server of one engine takes part in each step, and a step that fails anywhere fails the update: no server goes on with weights that the
others do not have. Transports are in ``sglang_transport``; adapters travel alone as the small files they are.
"""

import asyncio
import contextlib
import hashlib
import logging
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

_ADAPTERS_KEPT = 2
"""The newest adapter, and the one before, which requests that began earlier still use."""


class Refused(Exception):
    """The update was refused before anything changed."""


class Update(msgspec.Struct, frozen=True):
    """What an update moved. proof: SGLang's own checksum of the weights it now holds, the same on every server."""

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
        self._adapters: list[str] = []
        self.facts = Facts()
        self._proof = self._base = ""
        self._digest = ""

    async def start(self, facts: Facts) -> None:
        """Note what the servers hold; servers that hold different weights are refused."""
        self.facts = facts
        self._proof = self._base = await self._checksum()

    async def close(self) -> None:
        """Take this engine's adapters from servers that go on; one that is gone holds none."""
        with contextlib.suppress(InfrastructureFault):
            while self._adapters:
                await self._unload(self._adapters.pop())

    async def update(self, request: LoadRequest) -> Update:
        """Bring ``request.version`` into force. Raises Refused when nothing was changed, InfrastructureFault when something may be."""
        start = time.monotonic()
        folder = Path(request.path)
        try:
            manifest = published.read(folder, request.digest)
            chosen = transport.choose(manifest, self.facts, self.config, *transport.here(self.config, self.way))
            if chosen in ("adapter", "disk", "merged"):
                await asyncio.to_thread(self._verify, folder, request.digest)
        except (InfrastructureFault, ValueError, OSError) as fault:
            raise Refused(str(fault)) from None
        if chosen == "adapter":
            size = await self._adapter(request, folder)
            pause = 0.0
        else:
            size, pause = await self._paused(request, manifest, chosen)
        seconds = time.monotonic() - start
        log.info(
            "version %d by %s: %.1f MB in %.2f s (%.0f MB/s), generation paused for %.2f s, checksum %s",
            request.version, chosen, size / 1e6, seconds, size / 1e6 / seconds, pause, self._proof[:16],
        )  # fmt: skip
        self._digest = request.digest
        return Update(chosen, size, seconds, pause, self._proof)

    def _verify(self, folder: Path, expected: str) -> None:
        """The file is whole, and of this model: SGLang dies of a wrong shape, and says nothing of a missing or unknown name."""
        kind, path = weights.verified_file(folder, expected)
        with weights.BaseWeights(self.base) as base:
            weights.check(kind, path, base.shapes())

    # ------------------------------------------------------------------------------------------ whole weights

    async def _paused(
        self, request: LoadRequest, manifest: published.Manifest, chosen: transport.Transport
    ) -> tuple[int, float]:
        """Bytes moved and seconds paused. After a failure running requests are aborted before generation goes on."""
        begun = time.monotonic()
        moved = False
        await self._all("/pause_generation", {"mode": self.config.pause})
        try:
            size = await transport.move(chosen, self.way, self.base, request, manifest, self.config)
            await self._prove(request, manifest, chosen)
            moved = True
        finally:
            if not moved:
                await self._all("/abort_request", {"rid": "", "abort_all": True})
            await self._all("/continue_generation", {})
        self.adapter = ""
        return size, time.monotonic() - begun

    async def _prove(self, request: LoadRequest, manifest: published.Manifest, chosen: transport.Transport) -> None:
        """Raises InfrastructureFault unless every server holds the same weights, others than before, and where it can be seen, those of the file.

        On a GPU SGLang's checksum cannot be computed from a file; there the learner's watch sees weights that differ from its own.
        """
        answers = await self._all("/weights_checker", {"action": "checksum"})
        proof = self._agreed(answers)
        if proof == self._proof and request.digest != self._digest and self._digest:
            raise InfrastructureFault(
                f"{self.way.name} reports success, but its weights are those from before version {request.version}"
            )
        self._proof = self._base = proof
        if chosen == "disk" and self.facts.device == "cpu" and self.facts.tp == 1:
            path = Path(request.path) / published.FILES[manifest.kind]
            for answer in answers:
                held = answer["ranks"][0]["checksums"]
                await asyncio.to_thread(_compare, path, held, _STORED.get(self.facts.dtype, ""))

    async def _checksum(self) -> str:
        return self._agreed(await self._all("/weights_checker", {"action": "checksum"}))

    def _agreed(self, answers: list[dict[str, Any]]) -> str:
        """SGLang's checksum of its weights. Raises InfrastructureFault unless all servers give the same."""
        found = [str(answer.get("per_engine_checksum") or "") for answer in answers]
        if len(set(found)) != 1 or not found[0]:
            listed = ", ".join(f"{s.name}: {f[:16] or 'none'}" for s, f in zip(self.way.servers, found, strict=True))
            raise InfrastructureFault(f"servers of one engine hold different weights ({listed}): start them anew")
        return found[0]

    # ------------------------------------------------------------------------------------------ adapters

    async def _adapter(self, request: LoadRequest, folder: Path) -> int:
        """Load an adapter; requests from now on use it, running ones keep theirs. Its name is of this engine's life only:
        servers outlive actors, and refuse a name that they know."""
        while len(self._adapters) >= _ADAPTERS_KEPT:
            await self._unload(self._adapters.pop(0))
        name = f"coppice-v{request.version}-{uuid.uuid4().hex[:8]}"
        await self._all("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._adapters.append(name)
        self.adapter = name
        self._proof = hashlib.sha256(f"{self._base}{request.digest}".encode()).hexdigest()
        return (folder / published.FILES["lora"]).stat().st_size

    async def _unload(self, name: str) -> None:
        """SGLang waits for the requests that still use it."""
        await self._all("/unload_lora_adapter", {"lora_name": name})

    async def _all(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The same call to every server at once; all have answered or failed when it returns or raises."""
        timeout = self.config.update_timeout_s
        return await transport.gathered(server.call(path, body, timeout) for server in self.way.servers)


_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of number types, of torch and of safetensors."""
_PADDED = ("embed_tokens", "lm_head")


def _compare(path: Path, held: dict[str, str], dtype: str) -> None:
    """Tensors that a CPU server holds as the file does must have the file's checksum. Raises InfrastructureFault.

    There SGLang's checksum of a tensor is the first eight bytes of its SHA-256. Fused tensors have names of their own and are passed over,
    as are those whose rows it pads.
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
