"""Put a published policy version into a running model. The version's digest is verified before any
weight changes.

``wire.published`` describes a version folder. An adapter (kind "lora") is merged into the base
weights, which are read from the model folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from coppice.common import vision
from coppice.wire import digest, published
from coppice.wire.faults import InfrastructureFault


def verified_file(folder: Path, expected: str) -> tuple[str, Path]:
    """Return the kind and file of a version folder. Raises InfrastructureFault for its digest."""
    manifest = published.read(folder, expected)
    if not manifest.file:
        raise InfrastructureFault(
            f"weights {folder} are only in the learner's memory: set learner.publish to 'file' or"
            " 'both'"
        )
    path = folder / published.FILES[manifest.kind]
    try:
        actual = digest.safetensors_file(path)
    except (OSError, ValueError) as error:
        raise InfrastructureFault(
            f"weights {folder} cannot be read: {type(error).__name__}: {error}"
        ) from None
    if actual != expected:
        raise InfrastructureFault(
            f"weights {folder}: digest {actual[:16]}, expected {expected[:16]}; the old weights"
            " stay in force"
        )
    return manifest.kind, path


class Mixed(Exception):
    """A model holds only a part of the new weights and must not be used again."""


@torch.inference_mode()
def apply(model: Any, base: Path, kind: str, path: Path) -> None:
    """Copy weights into ``model``. Raises ValueError before any change, and Mixed midway."""
    parameters = {vision.stored(name): parameter for name, parameter in model.named_parameters()}
    hollow = {name: p.to("meta") for name, p in model.named_parameters()}
    stored = revert_weight_conversion(model, hollow)
    check(kind, path, {name: list(tensor.shape) for name, tensor in stored.items()})
    try:
        if kind == "full" and stored.keys() != parameters.keys():  # transformers joins experts
            source = _joined(model, path)
        else:
            source = whole(path) if kind == "full" else merged(base, path)
        for name, tensor in source:
            parameters[name].copy_(tensor)
    except Exception as error:  # after any error here, the model is a mixture of two versions
        raise Mixed(f"{path} was taken in part: {type(error).__name__}: {error}") from error


def _joined(model: Any, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a file's weights under the names and in the shapes of a loaded model."""
    fresh = type(model).from_pretrained(
        None, config=model.config, state_dict=dict(whole(path)), dtype=model.dtype
    )
    for name, parameter in fresh.named_parameters():
        yield vision.stored(name), parameter


def whole(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def check(kind: str, path: Path, held: dict[str, list[int]]) -> None:
    """Raises ValueError unless ``held`` has the name and shape of every weight in ``path``."""
    shapes = shapes_of(path) if kind == "full" else adapter_targets(path)
    for name, shape in shapes.items():
        expected = held.get(name, "no such tensor")
        if expected != shape:
            raise ValueError(
                f"{path}: tensor {name} {shape}, the model has {expected}: the weights belong to"
                " another model and none was loaded"
            )


def shapes_of(path: Path) -> dict[str, list[int]]:
    """Return the names and shapes of a file's tensors."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def adapter_targets(path: Path) -> dict[str, list[int]]:
    """Return names and shapes of the weights that an adapter changes. Raises ValueError unless
    the merged weights are base + lora_alpha / r * B A."""
    settings = json.loads((path.parent / "adapter_config.json").read_bytes())
    unmerged = {name: settings[name] for name in _UNMERGED if settings.get(name)}
    if settings.get("bias", "none") != "none":
        unmerged["bias"] = settings["bias"]
    if unmerged:
        raise ValueError(
            f"{path}: adapter settings {unmerged} cannot be merged here: expected a plain LoRA"
        )
    shapes = shapes_of(path)
    return {
        _target(name): [shapes[name.replace("lora_A", "lora_B")][0], shape[1]]
        for name, shape in shapes.items()
        if name.endswith("lora_A.weight")
    }


@torch.inference_mode()
def merged(base: Path, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and merged weights (float32) that an adapter changes."""
    settings = json.loads((path.parent / "adapter_config.json").read_bytes())
    scale = settings["lora_alpha"] / settings["r"]
    weights = BaseWeights(base)
    with safe_open(path, framework="pt") as adapter:
        for name in adapter.keys():  # noqa: SIM118
            if name.endswith("lora_A.weight"):
                down = adapter.get_tensor(name).float()
                up = adapter.get_tensor(name.replace("lora_A", "lora_B")).float()
                before = weights.get(_target(name)).float()
                yield _target(name), torch.addmm(before, up, down, alpha=scale)


def _target(name: str) -> str:
    return name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")


_UNMERGED = (
    "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save",
)  # fmt: skip


class BaseWeights:
    """The tensors of a model folder by name. An open file would keep every page that was read."""

    def __init__(self, folder: Path):
        self.shapes: dict[str, list[int]] = {}
        self._where: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            shapes = shapes_of(path)
            self.shapes |= shapes
            self._where |= dict.fromkeys(shapes, path)

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor as stored."""
        with safe_open(self._where[name], framework="pt") as file:
            return file.get_tensor(name)
