"""A version's weights as a folder of safetensors with a digest. The folder appears only when
complete, and every actor checks the digest."""

import hashlib
import json
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from coppice.common import vision
from coppice.common.atomic import drafted, write_whole
from coppice.common.frontier import runs
from coppice.learner.model.model import TreeModel
from coppice.learner.model.weight_server import WeightServer
from coppice.wire import digest
from coppice.wire.published import FILES, Manifest

_PIECE = 2**24
"""The number of values that are converted to 64 bits at a time."""


class Published(msgspec.Struct, frozen=True):
    """The newest weights, as ``RUN/learner.json`` names them. path and digest are empty for version
    0 (the model folder)."""

    version: int
    path: str
    digest: str


def publish(
    policy: TreeModel, version: int, run: Path, keep: int,
    whole: dict[str, torch.Tensor] | None = None, server: WeightServer | None = None,
    file: bool = True, trained: dict[int, int] | None = None,
) -> Published:  # fmt: skip
    """Write ``RUN/weights/vNNNNNN`` with adapters in the PEFT format, or with all weights. Only the
    ``keep`` newest folders stay.

    whole: the complete parameters, if sharded ranks have gathered them. server: also serves all
    weights from memory. file: if False and there is a server, the folder says only where the
    weights are. Adapters are always written to a file. trained: see ``announce``.
    """
    folder = run / "weights" / f"v{version:06d}"
    with drafted(folder, replace=True, alone=True) as draft:
        if policy.lora:
            proof = _write_adapter(policy, whole or policy.gathered(), draft)
            manifest = Manifest(version, "lora", proof)
        else:
            if whole is None and server is None:
                whole = policy.gathered()
            parameters = policy.trained() if whole is None else whole
            narrow = {n: p.detach().to(policy.compute) for n, p in parameters.items()}
            # as a model folder names them: transformers joins experts and renames while it loads
            tensors = revert_weight_conversion(policy.causal, narrow)
            memory, file = None, file or server is None
            if file:
                proof = _write({n: t.cpu() for n, t in tensors.items()}, draft / FILES["full"])
            else:
                proof = fingerprint(tensors)
            if server is not None:  # copies, because training goes on while engines read them
                own = {n: t.to(policy.device, copy=True) for n, t in tensors.items()}
                memory = server.offer(version, own)
            manifest = Manifest(version, "full", proof, file, memory)
        manifest.write(draft)
    published = Published(version, str(folder), manifest.digest)
    announce(run, published, trained)
    for old in sorted(folder.parent.glob("v??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return published


def _write_adapter(policy: TreeModel, whole: dict[str, torch.Tensor], folder: Path) -> str:
    settings = policy.model.peft_config["default"].to_dict()
    # PEFT also names layers that it excluded
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in whole}
    settings["target_modules"] = sorted(adapted)
    (folder / "adapter_config.json").write_text(json.dumps(settings, default=str, indent=1))
    tensors = {vision.stored(n.replace(".default", "")): p for n, p in whole.items()}
    return _write(tensors, folder / FILES["lora"])


def _write(tensors: dict[str, torch.Tensor], path: Path) -> str:
    save_file(tensors, path, metadata={"format": "pt"})
    return digest.safetensors_file(path)


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Return an identifier of weights that are in no file, from two sums over each tensor's bits,
    computed on their device. Unlike a file's digest, it does not protect against forgery."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        bits = tensors[name].detach().contiguous().view(torch.int16).flatten()
        plain = weighted = 0
        for first in range(0, bits.numel(), _PIECE):
            piece = bits[first : first + _PIECE].long()
            place = torch.arange(first, first + piece.numel(), device=piece.device) % 65521 + 1
            plain += int(piece.sum())
            weighted += int((piece * place).sum())
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        total.update(f"{name}\0{shape}\0{dtype}\0{plain}\0{weighted}\0".encode())
    return total.hexdigest()


def announce(run: Path, published: Published, trained: dict[int, int] | None = None) -> None:
    """Write ``RUN/learner.json``, which a scheduler reads when it starts. trained: the version of
    each group trained after the newest checkpoint, whose trees are admitted no second time."""
    write_whole(
        run / "learner.json", {**msgspec.structs.asdict(published), "trained": runs(trained or {})}
    )
