"""How whole weights reach SGLang: from the version's file, out of the learner's memory on the same GPU, or by a broadcast between GPUs.

The last two are asked for through the learner's rendezvous (``learner.giver``), bucket by bucket. SGLang takes the handles of shared memory
as a pickle of its own making; nothing of ours reads one.
"""

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from actors.config import SGLangConfig
from actors.engines.sglang_api import Facts, Way
from wire.faults import InfrastructureFault
from wire.messages import LoadRequest
from wire.published import Manifest, Memory

Transport = Literal["disk", "merged", "adapter", "tensor", "distributed"]


def choose(manifest: Manifest, facts: Facts, config: SGLangConfig, host: str, gpus: frozenset[str]) -> Transport:
    """The transport of one version. host, gpus: where SGLang runs ("" and empty when unknown).

    Raises InfrastructureFault when what the config asks for cannot be had.
    """
    if manifest.kind == "lora":
        return config.lora
    memory = manifest.memory
    if config.weights != "auto":
        have = manifest.file if config.weights == "disk" else memory is not None
        if not have:
            need = "file" if config.weights == "disk" else "memory"
            raise InfrastructureFault(
                f'actors.sglang.weights = "{config.weights}", but version {manifest.version} is not published that way: set'
                f' learner.publish to "{need}" or "both"'
            )
        return config.weights
    if memory is None:
        return "disk"
    if memory.device == "cuda" and facts.device == "cuda":
        return "tensor" if memory.host == host and memory.gpu in gpus else "distributed"
    if manifest.file:
        return "disk"
    return "tensor" if memory.host == host else "distributed"


async def move(
    chosen: Transport, way: Way, base: Path, request: LoadRequest, manifest: Manifest, config: SGLangConfig
) -> int:
    """Bytes that reached each server. Raises InfrastructureFault when any server does not confirm."""
    folder = Path(request.path)
    if chosen == "disk":
        return await _from_disk(way, folder, request.version, config)
    if chosen == "merged":
        with tempfile.TemporaryDirectory(prefix="coppice-merged-") as scratch:
            await asyncio.to_thread(_merge, base, folder, Path(scratch))
            return await _from_disk(way, Path(scratch), request.version, config)
    assert manifest.memory is not None
    sizes = await gathered(_pull(server, chosen, manifest, config) for server in way.servers)
    return max(sizes)


async def gathered(calls: Any) -> list[Any]:
    """The results of all; raises the first failure once none of them runs any more."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return done


# ---------------------------------------------------------------------------------------------- from a file


async def _from_disk(way: Way, folder: Path, version: int, config: SGLangConfig) -> int:
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": config.pause == "retract"}
    await gathered(server.call("/update_weights_from_disk", body, config.update_timeout_s) for server in way.servers)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _merge(base: Path, adapter: Path, folder: Path) -> None:
    """The weights that an adapter changes as a file of their own, in the base model's number type."""
    from safetensors.torch import save_file

    from actors.engines.weights import BaseWeights, merged
    from wire.published import FILES

    with BaseWeights(base) as stored:
        tensors = {
            name: tensor.to(stored.get(name).dtype).contiguous()
            for name, tensor in merged(base, adapter / FILES["lora"])
        }
    save_file(tensors, folder / FILES["full"], metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------- from the learner's memory


class Bucket:
    """A share of the weights as the learner describes it. payloads: handles, one a tensor-parallel rank (transport "tensor")."""

    def __init__(self, told: dict[str, Any]):
        self.names: list[str] = told["names"]
        self.dtypes: list[str] = told["dtypes"]
        self.shapes: list[list[int]] = told["shapes"]
        self.bytes: int = told["bytes"]
        self.payloads: list[str] = told.get("payloads", [])


async def _pull(server: Any, chosen: Transport, manifest: Manifest, config: SGLangConfig) -> int:
    """One server takes the version out of the learner's memory. Returns bytes."""
    facts = await server.facts()
    group = f"coppice-{uuid.uuid4().hex[:12]}"
    ask = {"version": manifest.version, "transport": chosen, "ranks": facts.tp, "group": group}
    ask |= {"backend": "nccl" if facts.device == "cuda" else "gloo"}
    assert manifest.memory is not None
    talk = await asyncio.to_thread(Talk, manifest.memory, config.update_timeout_s)
    told = await asyncio.to_thread(talk.ask, ask)
    buckets = [Bucket(bucket) for bucket in told["buckets"]]
    if chosen == "distributed":
        await server.call("/init_weights_update_group", {
            "master_address": told["address"], "master_port": told["port"], "rank_offset": 1,
            "world_size": 1 + facts.tp, "group_name": group, "backend": ask["backend"],
        }, config.update_timeout_s)  # fmt: skip
    try:
        await server.call("/begin_weight_update", {}, config.update_timeout_s)
        try:
            for index, bucket in enumerate(buckets):
                await _take(server, chosen, bucket, group, manifest.version, index == len(buckets) - 1, config)
        finally:
            await server.call("/end_weight_update", {}, config.update_timeout_s)
    finally:
        await asyncio.to_thread(talk.done)
        if chosen == "distributed":
            await server.call("/destroy_weights_update_group", {"group_name": group}, config.update_timeout_s)
    return sum(bucket.bytes for bucket in buckets)


async def _take(
    server: Any, chosen: Transport, bucket: Bucket, group: str, version: int, last: bool, config: SGLangConfig
) -> None:
    body: dict[str, Any] = {"flush_cache": last and config.pause == "retract"}
    body |= {"weight_version": str(version)} if last else {}
    if chosen == "tensor":
        body |= {"serialized_named_tensors": bucket.payloads}
        await server.call("/update_weights_from_tensor", body, config.update_timeout_s)
        return
    body |= {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": group}
    body |= {"load_format": "flattened_bucket"}
    await server.call("/update_weights_from_distributed", body, config.update_timeout_s)


class Talk:
    """One conversation with the learner's rendezvous. Blocking; every wait has an end."""

    def __init__(self, memory: Memory, timeout_s: float):
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.memory = memory
        host, _, port = memory.store.rpartition(":")
        try:
            self._store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise InfrastructureFault(f"the learner's rendezvous {memory.store} cannot be reached: {error}") from None
        self._number = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The learner's answer. Raises InfrastructureFault when it gives another version by now, or does not answer."""
        self._number = self._store.add("asked", 1)
        self._store.set(f"ask/{self._number}", json.dumps(request))
        try:
            answer = json.loads(self._store.get(f"answer/{self._number}"))
        except RuntimeError as error:
            raise InfrastructureFault(f"the learner at {self.memory.store} did not answer: {error}") from None
        if "error" in answer:
            raise InfrastructureFault(f"the learner at {self.memory.store}: {answer['error']}")
        return answer

    def done(self) -> None:
        """The weights were taken, or the attempt is over: the learner may let go of what it held for it."""
        with contextlib.suppress(RuntimeError):  # it may be gone, and holds nothing then
            self._store.set(f"done/{self._number}", "1")


def here(config: SGLangConfig, way: Way) -> tuple[str, frozenset[str]]:
    """Host and GPUs of SGLang as far as this process knows them."""
    if config.way == "url" and not way.is_here():  # pyright: ignore[reportAttributeAccessIssue]
        return "", frozenset()
    shown = (config.environment | os.environ).get("CUDA_VISIBLE_DEVICES", "") if config.way != "url" else ""
    return socket.gethostname(), frozenset(gpu for gpu in shown.split(",") if gpu)
