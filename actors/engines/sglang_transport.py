"""How weights reach SGLang: from the version's file, or bucket by bucket out of the learner's
memory (on the same GPU, or by a broadcast), as agreed at the learner's rendezvous
(``learner.model.weight_server``).

SGLang takes handles of shared memory as a pickle that SGLang made. The pickle goes from the learner
to the server, and Coppice never reads it. An answer that is not sealed with the run's token is
refused, so nobody else can have a server read a pickle of theirs.
"""

import asyncio
import contextlib
import json
import logging
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from safetensors.torch import save_file

from coppice.actors.config import SGLangConfig
from coppice.actors.engines.sglang_api import Facts
from coppice.actors.engines.weights import BaseWeights, merged
from coppice.common import hardware
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import FILES, Manifest, Memory, opened, prefix, sealed

log = logging.getLogger("actors.sglang")

Transport = Literal["disk", "merged", "adapter", "tensor", "distributed"]

_CLEANUP_S = 30.0
"""The limit of a call that cleans up after a failure. A longer wait would only delay the report."""


def choose(
    manifest: Manifest, facts: Facts, config: SGLangConfig, host: str, gpus: frozenset[str]
) -> Transport:
    """Return the transport of one version. host, gpus: where SGLang runs ("" and empty when
    unknown). Raises InfrastructureFault when the version is not published as the config asks."""
    memory = manifest.memory
    if manifest.kind == "lora":
        return config.lora
    if config.weights != "auto":
        need = "file" if config.weights == "disk" else "memory"
        if not manifest.file if need == "file" else memory is None:
            raise InfrastructureFault(
                f'actors.sglang.weights = "{config.weights}", but version {manifest.version} is not'
                f' published that way: set learner.publish to "{need}" or "both"'
            )
        return config.weights
    if memory is None:
        return "disk"
    if memory.device == "cuda" and facts.device == "cuda":
        return "tensor" if memory.host == host and memory.gpu in gpus else "distributed"
    if manifest.file:
        return "disk"
    return "tensor" if memory.host == host else "distributed"


def place(config: SGLangConfig, servers: Sequence[Any]) -> tuple[str, frozenset[str]]:
    """Return the host and the GPUs of the servers, as far as this process knows them."""
    if config.way == "url":
        ours = {"127.0.0.1", "localhost", "::1", socket.gethostname()}
        same = {urlparse(server.url).hostname for server in servers} <= ours
        return (socket.gethostname() if same else ""), frozenset()
    shown = config.environment.get("CUDA_VISIBLE_DEVICES")
    gpus = hardware.visible_gpus() if shown is None else shown.split(",")
    return socket.gethostname(), frozenset(gpu for gpu in gpus if gpu)


def merge(base: Path, adapter: Path) -> tempfile.TemporaryDirectory[str]:
    """Write an adapter merged into the base weights, in their number type, to a new folder."""
    stored = BaseWeights(base)
    tensors = {
        name: tensor.to(stored.get(name).dtype).contiguous()
        for name, tensor in merged(base, adapter / FILES["lora"])
    }
    folder = tempfile.TemporaryDirectory(prefix="coppice-merged-")
    save_file(tensors, Path(folder.name) / FILES["full"], metadata={"format": "pt"})
    return folder


async def prepare(
    chosen: Transport, servers: Mapping[Any, Facts], manifest: Manifest, config: SGLangConfig
) -> dict[Any, "Pull"]:
    """Ask the learner to offer this version to all servers at once, before generation pauses.
    Raises InfrastructureFault when it refuses one of them; nothing has changed then."""
    pulls = {
        server: Pull(server, facts, chosen, manifest, config) for server, facts in servers.items()
    }
    asks = (asyncio.to_thread(pull.ask) for pull in pulls.values())
    outcomes = await asyncio.gather(*asks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            await asyncio.gather(*(pull.release() for pull in pulls.values()))
            raise outcome
    return pulls


class Pull:
    """One server's part of an update: ``ask`` while it generates, then ``take`` or ``release``."""

    def __init__(
        self, server: Any, facts: Facts, chosen: str, manifest: Manifest, config: SGLangConfig
    ):
        assert manifest.memory is not None
        self.server, self.memory, self.timeout_s = server, manifest.memory, config.update_timeout_s
        self.flush, self.broadcast = config.pause == "retract", chosen == "distributed"
        gpus = self.memory.device == facts.device == "cuda"
        self.request = {
            "version": manifest.version, "transport": chosen, "ranks": facts.tp,
            "backend": "nccl" if gpus else "gloo", "group": f"coppice-{uuid.uuid4().hex[:12]}",
        }  # fmt: skip
        self.offer: dict[str, Any] = {}
        self._rendezvous: Rendezvous | None = None

    def ask(self) -> None:
        """Ask the learner for the version, which blocks. Raises InfrastructureFault."""
        rendezvous = Rendezvous(self.memory, self.timeout_s)
        self.offer = rendezvous.ask(self.request)
        self._rendezvous = rendezvous

    async def take(self) -> int:
        """Move all weights and return their bytes. Releases everything after a failure."""
        buckets, group = self.offer["buckets"], {"group_name": self.request["group"]}
        path = f"/update_weights_from_{self.request['transport']}"
        try:
            await self._begin()
            for index, bucket in enumerate(buckets):
                body = {"flush_cache": self.flush and index == len(buckets) - 1}
                if self.broadcast:
                    body |= {name: bucket[name] for name in ("names", "dtypes", "shapes")}
                    body |= group | {"load_format": "flattened_bucket"}
                else:
                    body |= {"serialized_named_tensors": bucket["payloads"]}
                await self._call(path, body)
            await self._call("/end_weight_update", {})
        except BaseException:
            await self._clean_up("/end_weight_update", {})
            raise
        finally:
            await self.release()
            if self.broadcast:
                await self._clean_up("/destroy_weights_update_group", group)
        return sum(bucket["bytes"] for bucket in buckets)

    async def release(self) -> None:
        """Tell the learner that it may free what it holds for this pull."""
        if self._rendezvous is not None:
            await asyncio.to_thread(self._rendezvous.done)

    async def _begin(self) -> None:
        if self.broadcast:
            await self._call("/init_weights_update_group", {
                "master_address": self.offer["address"], "master_port": self.offer["port"],
                "world_size": 1 + self.request["ranks"], "rank_offset": 1,
                "group_name": self.request["group"], "backend": self.request["backend"],
            })  # fmt: skip
        try:
            await self._call("/begin_weight_update", {})
        except InfrastructureFault as fault:
            if "already open" not in str(fault):
                raise
            await self._call("/end_weight_update", {})  # ends an earlier update that was cut off
            await self._call("/begin_weight_update", {})

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        await self.server.call(path, body, self.timeout_s)

    async def _clean_up(self, path: str, body: dict[str, Any]) -> None:
        """Only log a failure of this call, so that the first failure is the one reported."""
        try:
            await self.server.call(path, body, min(_CLEANUP_S, self.timeout_s))
        except InfrastructureFault as fault:
            log.warning("%s", fault)


class Rendezvous:
    """A conversation at the learner's rendezvous: ``ask``, then ``done``. Its calls block."""

    def __init__(self, memory: Memory, timeout_s: float):
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore

        self.memory = memory
        host, _, port = memory.store.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(
                f"the learner's rendezvous {memory.store} cannot be reached: {error}"
            ) from None
        self._store = PrefixStore(prefix(memory.token), store)
        self._number = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the learner's answer. Raises InfrastructureFault when it refuses or is gone."""
        try:
            self._number = self._store.add("asked", 1)
            token, question, reply = (
                self.memory.token,
                f"ask/{self._number}",
                f"answer/{self._number}",
            )
            self._store.set(question, sealed(token, question, json.dumps(request)))
            answer = json.loads(opened(token, reply, self._store.get(reply)))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(
                f"the learner at {self.memory.store} did not answer: {error}"
            ) from None
        if "error" in answer or not answer.get("buckets"):
            raise InfrastructureFault(
                f"the learner at {self.memory.store}: {answer.get('error', 'offers no weights')}"
            )
        return answer

    def done(self) -> None:
        """Tell the learner that the weights were taken or the attempt is over."""
        with contextlib.suppress(RuntimeError):  # a learner that is gone holds nothing
            self._store.set(f"done/{self._number}", "1")
