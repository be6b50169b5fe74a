"""Put a published policy version into a running model. The version's digest is verified before any
weight changes.

``wire.published`` describes a version folder. An adapter (kind "lora") is merged into the base
weights, which are read from the model folder.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from coppice.common import deltas, vision
from coppice.common.atomic import draft_of
from coppice.wire import digest, published
from coppice.wire.faults import InfrastructureFault


class Version(msgspec.Struct, frozen=True):
    """Proven weights: a file, then folders of changes to it in their order. held: the engine has
    what the file says, which may be gone."""

    kind: str
    path: Path
    changes: list[Path]
    held: bool = False


def verified(folder: Path, expected: str, held: str = "") -> Version:
    """Return the weights of a version folder. held: the digest of whole weights that the engine
    has; it needs only what follows. Raises InfrastructureFault for what is missing or damaged."""
    links = published.chain(folder, expected)
    places = [number for number, (_, link) in enumerate(links) if held and link.digest == held]
    done = 1 + max(places, default=-1)
    for number, (place, manifest) in enumerate(links[done:], done):
        if not manifest.file:
            raise InfrastructureFault(
                f"weights {place} are only in the learner's memory: set learner.publish to 'file'"
                " or 'both'"
            )
        try:
            if manifest.previous:
                actual = published.following(links[number - 1][1].digest, place)
            else:
                actual = digest.safetensors_file(place / published.FILES[manifest.kind])
        except (OSError, ValueError) as error:
            raise InfrastructureFault(
                f"weights {place} cannot be read: {type(error).__name__}: {error}"
            ) from None
        if actual != manifest.digest:
            raise InfrastructureFault(
                f"weights {place}: digest {actual[:16]}, expected {manifest.digest[:16]}; the old"
                " weights stay in force"
            )
    first, kind = links[max(0, done - 1)][0], links[0][1].kind
    changes = [place for place, _ in links[max(1, done) :]]
    return Version(kind, first / published.FILES[kind], changes, done > 0)


def assembled(version: Version) -> Path:
    """Return a folder with all weights of a version in one file, which SGLang needs. The first
    actor writes it into the version's folder, where the others find it. Raises OSError."""
    if not version.changes:
        return version.path.parent
    folder = version.changes[-1]
    whole_file = folder / published.FILES["full"]
    with (folder / published.NAME).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole_file.exists():
            draft = draft_of(whole_file)
            try:
                shutil.copyfile(version.path, draft)
                _change(version.changes, deltas.mapped(draft))
                draft.rename(whole_file)
            finally:
                draft.unlink(missing_ok=True)
    return folder


def _change(folders: list[Path], tensors: dict[str, Any]) -> None:
    for folder in folders:
        for path in sorted(folder.glob(published.DELTAS)):
            deltas.apply(path, tensors)


class Mixed(Exception):
    """A model holds only a part of the new weights and must not be used again."""


@torch.inference_mode()
def apply(model: Any, base: Path, version: Version) -> None:
    """Copy weights into ``model``. Raises ValueError before any change, and Mixed midway."""
    kind, path = version.kind, version.path
    parameters = {vision.stored(name): parameter for name, parameter in model.named_parameters()}
    hollow = {name: p.to("meta") for name, p in model.named_parameters()}
    stored = revert_weight_conversion(model, hollow)
    if not version.held:
        check(kind, path, {name: list(tensor.shape) for name, tensor in stored.items()})
    try:
        if version.held:
            source = iter(())
        elif kind == "full" and stored.keys() != parameters.keys():  # transformers joins experts
            source = _joined(model, path)
        else:
            source = whole(path) if kind == "full" else merged(base, path)
        for name, tensor in source:
            parameters[name].copy_(tensor)
        _change(version.changes, parameters)
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
    compare(path, shapes_of(path) if kind == "full" else adapter_targets(path), held)


def compare(source: object, shapes: dict[str, list[int]], held: dict[str, list[int]]) -> None:
    """Raises ValueError unless ``held`` has the name and shape of every weight of a source."""
    for name, shape in shapes.items():
        if (expected := held.get(name, "no such tensor")) != shape:
            raise ValueError(
                f"{source}: tensor {name} {shape}, the model has {expected}: the weights belong to"
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
    downs = [name for name in shapes if name.endswith("lora_A.weight")]
    ups = [shapes[name.replace("lora_A", "lora_B")] for name in downs]
    return {_target(n): [up[0], shapes[n][1]] for n, up in zip(downs, ups, strict=True)}


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
