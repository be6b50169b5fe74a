"""A model folder's weights. Sharded ranks make the model hollow (on torch's meta device, without
values), shard it, and then each reads its own rows alone. Replicated ranks of a machine share the
frozen weights of a model with adapters.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers.integrations import moe

from coppice.common import vision
from coppice.learner.forest.attention import NAME
from coppice.learner.model.adapters import install
from coppice.learner.model.ranks import Ranks, own_rows

log = logging.getLogger("learner.loading")

_FLOATS = ("F64", "F32", "F16", "BF16")


def load(folder: str, hollow: bool) -> Any:
    """Return the model of a folder, in float32. If ``hollow``, without values, unless the folder
    stores a parameter under another name (experts that transformers joins while it loads): then
    every rank holds a whole copy for a while."""
    if not hollow:
        return vision.load(folder, torch.float32, NAME)
    with init_empty_weights(include_buffers=False):
        model = vision.load(folder, torch.float32, NAME, values=False)
    model.tie_weights()  # each parameter became hollow on its own
    stored = _stored(folder)
    for weight, names in _names(model).items():
        if _entry(stored, names, weight) is None:
            told = "%s does not store %s as the model has it: every rank loads all weights first"
            log.warning(told, folder, names[0])
            return vision.load(folder, torch.float32, NAME)
    return model


def adapt(model: Any, adapters: LoraConfig) -> Any:
    """Return the model with new adapters, which have values also if the model is hollow: PEFT puts
    an adapter beside the weight that it adapts."""
    hollow = next(model.parameters()).is_meta
    if hollow:  # one number that stands for all of them
        _replace(model, lambda _, weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    model = get_peft_model(model, adapters)
    if hollow:
        _replace(model, lambda _, weight: weight.to("meta") if not any(weight.stride()) else weight)
    settings = model.peft_config["default"]
    ranks = {len(weight) for name, weight in model.named_parameters() if ".lora_A." in name}
    if ranks != {settings.r}:
        raise ValueError(
            f"{model.config.model_type}: adapters of ranks {sorted(ranks)}: expected"
            f" learner.lora.rank = {settings.r} alone; train all weights (learner.lora.rank = 0)"
        )
    # PEFT adds patterns for joined experts, which have no adapters
    settings.rank_pattern, settings.alpha_pattern = {}, {}
    install(model)
    return model


def check_names(folder: str, names: list[str]) -> None:
    """Raise ValueError if a model folder calls an adapted module otherwise than transformers does:
    no engine would find the module of the adapter."""
    held = _stored(folder)
    if other := [name for name in names if f"{vision.stored(name)}.weight" not in held]:
        raise ValueError(
            f"{folder} has another name for {other[0]}, so engines find no adapters for it; train"
            " all weights (learner.lora.rank = 0)"
        )


def fill(tower: torch.nn.Module, folder: str, device: str) -> None:
    """Read this rank's rows of each hollow parameter of a sharded tower from the model's folder.
    Uses no collectives."""
    stored = _stored(folder)

    def filled(names: list[str], weight: torch.Tensor) -> torch.Tensor:
        if not (isinstance(weight, DTensor) and weight.is_meta):
            return weight
        entry, (local, first) = _entry(stored, list(map(_plain, names)), weight), own_rows(weight)
        assert entry is not None, "load has found every hollow parameter in the folder"
        rows = entry[first : first + len(local)] if len(local) else torch.empty(local.shape)
        rows = rows.to(device, weight.dtype, copy=True)  # a slice is a view of the mapped file
        size, stride = weight.shape, weight.stride()
        return DTensor.from_local(
            rows, weight.device_mesh, weight.placements, run_check=False, shape=size, stride=stride
        )

    _replace(tower, filled)


def _stored(folder: str) -> dict[str, Any]:
    """Return the file of each tensor of a model folder, by the tensor's name."""
    paths = sorted(Path(folder).glob("model*.safetensors"))
    files = [safe_open(path, framework="pt") for path in paths]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _entry(stored: dict[str, Any], names: list[str], weight: torch.Tensor) -> Any:
    """Return the slice of a folder that holds a parameter under one of its names, or None."""
    for name in map(vision.stored, names):
        if name in stored:
            entry = stored[name].get_slice(name)
            if entry.get_shape() == list(weight.shape) and entry.get_dtype() in _FLOATS:
                return entry
    return None


def _plain(name: str) -> str:
    """Return the name that a tower's parameter has in the model without adapters."""
    name = name.removeprefix("model.").removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".")


def _names(module: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Return the names of each parameter. A tied parameter has several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _replace(
    module: torch.nn.Module, value: Callable[[list[str], torch.Tensor], torch.Tensor]
) -> None:
    """Replace each parameter by one with ``value`` of its names and itself, unless that is itself.
    Tied parameters stay tied."""
    for parameter, names in _names(module).items():
        before = parameter.detach()
        if (after := value(names, before)) is before:
            continue
        new = torch.nn.Parameter(after, parameter.requires_grad)
        for owner, _, name in (one.rpartition(".") for one in names):
            module.get_submodule(owner)._parameters[name] = new


_ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes, as an allocator would place it."""


_grouped_mm = moe._grouped_mm


def _experts(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The products of joined experts, for which autocast has no rule. Importing this module puts
    it in the place of transformers' function, for the whole process."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, weight = input.to(dtype), weight.to(dtype)
    return _grouped_mm(input, weight, offs)


moe._grouped_mm = _experts


def narrow(model: Any, compute: torch.dtype) -> None:
    """Convert the frozen weights of linear layers and of joined experts to ``compute``, also those
    without values.

    Autocast rounds a linear layer's weight at every forward and keeps the rounded copy for
    backward. Rounding the weight once gives the same products. Embeddings and norms stay in
    float32, as under autocast. Nothing may write to these weights afterwards.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        if not linear.weight.requires_grad and id(linear.weight) not in embeddings:
            linear.weight.data = linear.weight.data.to(compute)
    for name, weight in model.named_parameters():
        if ".experts." in name and weight.ndim == 3 and not weight.requires_grad:
            weight.data = weight.data.to(compute)


def hold(model: Any, ranks: Ranks) -> None:
    """Move all frozen weights, as rank 0 has them, into memory that the ranks of one machine share,
    a file that ends with the last rank: a collective of replicated ranks on a CPU."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.count)
    if ranks.count == 1 or not one_machine or not hasattr(os, "memfd_create"):
        return
    weights = [weight for weight in model.parameters() if not weight.requires_grad]
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT)
    first, file = ranks.rank == 0, -1
    if first:
        file = os.memfd_create("frozen-weights")
        os.ftruncate(file, ends[-1])
    where = ranks.broadcast(f"/proc/{os.getpid()}/fd/{file}".encode() if first else None)
    memory = torch.from_file(where.decode(), shared=True, size=ends[-1], dtype=torch.uint8)
    for weight, start in zip(weights, ends, strict=False):
        place = memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        if first:
            place.copy_(weight.data)
        weight.data = place
    ranks.barrier()  # the file is complete, and every rank has mapped it
    if first:
        os.close(file)
