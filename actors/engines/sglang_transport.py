"""How whole weights reach SGLang: from the version's file, from the learner's memory on the same
GPU, or by a broadcast between GPUs.

The last two transports are in ``sglang_pull``.
"""

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from coppice.actors.config import SGLangConfig
from coppice.actors.engines.sglang_api import Facts
from coppice.actors.engines.sglang_pull import Pull
from coppice.common import hardware
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Manifest

Transport = Literal["disk", "merged", "adapter", "tensor", "distributed"]


def choose(
    manifest: Manifest, facts: Facts, config: SGLangConfig, host: str, gpus: frozenset[str]
) -> Transport:
    """Return the transport of one version. host, gpus: where SGLang runs ("" and empty when
    unknown).

    Raises InfrastructureFault when the version is not published in the way that the config asks
    for.
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


async def prepare(
    chosen: Transport, servers: Mapping[Any, Facts], manifest: Manifest, config: SGLangConfig
) -> dict[Any, Pull]:
    """Prepare the pulls before generation pauses: for all servers at once, ask the learner to offer
    this version.

    Raises InfrastructureFault when the learner does not offer it to one of them, and then nothing
    has changed.
    """
    assert manifest.memory is not None
    calls = [
        Pull.asked(one, facts, chosen, manifest.version, manifest.memory, config)
        for one, facts in servers.items()
    ]
    asked = await asyncio.gather(*calls, return_exceptions=True)
    pulls = {pull.server: pull for pull in asked if isinstance(pull, Pull)}
    if len(pulls) < len(calls):
        await gathered(pull.release() for pull in pulls.values())
        raise next(outcome for outcome in asked if isinstance(outcome, BaseException))
    return pulls


async def move(server: Any, folder: Path, config: SGLangConfig, pull: Pull | None) -> int:
    """Move the weights from the file in ``folder`` or from the learner's memory into a server whose
    generation pauses, and return their bytes.

    Raises InfrastructureFault when the server does not confirm them.
    """
    if pull is not None:
        return await pull.take()
    body = {"model_path": str(folder), "flush_cache": config.pause == "retract"}
    await server.call("/update_weights_from_disk", body, config.update_timeout_s)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


async def gathered(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the results of all calls. The first failure is raised after every call has ended."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return done


def merge(base: Path, adapter: Path) -> tempfile.TemporaryDirectory[str]:
    """Write the weights that an adapter changes, merged, to a file in a new folder, in the base
    model's number type."""
    from safetensors.torch import save_file

    from coppice.actors.engines.weights import BaseWeights, merged
    from coppice.wire.published import FILES

    stored = BaseWeights(base)
    tensors = {
        name: tensor.to(stored.get(name).dtype).contiguous()
        for name, tensor in merged(base, adapter / FILES["lora"])
    }
    folder = tempfile.TemporaryDirectory(prefix="coppice-merged-")
    save_file(tensors, Path(folder.name) / FILES["full"], metadata={"format": "pt"})
    return folder


def here(config: SGLangConfig, servers: Sequence[Any]) -> tuple[str, frozenset[str]]:
    """Return the host and the GPUs of the servers, as far as this process knows them."""
    if config.way == "url":
        ours = {"127.0.0.1", "localhost", "::1", socket.gethostname()}
        same = {urlparse(server.url).hostname for server in servers} <= ours
        return (socket.gethostname() if same else ""), frozenset()
    shown = config.environment.get("CUDA_VISIBLE_DEVICES")
    gpus = hardware.visible_gpus() if shown is None else shown.split(",")
    return socket.gethostname(), frozenset(gpu for gpu in gpus if gpu)
