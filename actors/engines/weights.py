"""A published policy version put into a running model, proven by its digest before any weight changes.

A version folder holds ``manifest.json`` {version, kind, digest} and ``model.safetensors`` (kind "full") or
``adapter_model.safetensors`` with ``adapter_config.json`` (kind "lora": merged into the base weights, read anew from the model folder).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from wire import digest
from wire.faults import InfrastructureFault

FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


def verified_file(folder: Path, expected: str) -> tuple[str, Path]:
    """Kind and weights file of a version folder. Raises InfrastructureFault when it is missing or its digest disagrees."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        path = folder / FILES[manifest["kind"]]
        found = digest.safetensors_file(path)
    except (OSError, KeyError, ValueError) as error:
        raise InfrastructureFault(f"weights {folder} cannot be read: {type(error).__name__}: {error}") from None
    if found != expected:
        raise InfrastructureFault(
            f"weights {folder}: digest {found[:16]}, expected {expected[:16]}; the old weights stay in force"
        )
    return manifest["kind"], path


@torch.inference_mode()
def apply(model: Any, base: Path, kind: str, path: Path) -> None:
    """Copy the weights of ``path`` into ``model`` in place. Raises ValueError, before any change, for weights of another model."""
    parameters = dict(model.named_parameters())
    if kind == "full":
        with safe_open(path, framework="pt") as file:
            _check({name: _shape(file, name) for name in file.keys()}, parameters, path)  # noqa: SIM118
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                parameters[name].copy_(file.get_tensor(name))
        return
    settings = json.loads((path.parent / "adapter_config.json").read_bytes())
    scale = settings["lora_alpha"] / settings["r"]
    with safe_open(path, framework="pt") as adapter, BaseWeights(base) as weights:
        targets = {
            name: name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            for name in adapter.keys()  # noqa: SIM118
            if name.endswith("lora_A.weight")
        }
        shapes = {
            target: [_shape(adapter, name.replace("lora_A", "lora_B"))[0], _shape(adapter, name)[1]]
            for name, target in targets.items()
        }
        _check(shapes, parameters, path)
        for name, target in targets.items():
            down = adapter.get_tensor(name).float()
            up = adapter.get_tensor(name.replace("lora_A", "lora_B")).float()
            merged = torch.addmm(weights.get(target).float(), up, down, alpha=scale)
            parameters[target].copy_(merged)


def _shape(file: Any, name: str) -> list[int]:
    return file.get_slice(name).get_shape()


def _check(shapes: dict[str, list[int]], parameters: dict[str, torch.nn.Parameter], path: Path) -> None:
    for name, shape in shapes.items():
        held = list(parameters[name].shape) if name in parameters else "no such tensor"
        if held != shape:
            raise ValueError(
                f"{path}: tensor {name} {shape}, the model has {held}: weights of another model, none taken"
            )


class BaseWeights:
    """The tensors of a model folder by name, mapped from disk (all actors of a machine share the pages)."""

    def __init__(self, folder: Path):
        self._files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> "BaseWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._where.clear()
        self._files.clear()

    def get(self, name: str) -> torch.Tensor:
        """One tensor as stored."""
        return self._where[name].get_tensor(name)
