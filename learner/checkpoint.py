"""A checkpoint is a folder that appears whole or not at all: trained weights, optimizer state, version, trained group ids.

Exactly-once training rests on it: a group is trained iff its id is in the frontier of the checkpoint that is resumed.
"""

import os
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from learner.trainer import Trainer


class State(msgspec.Struct, frozen=True):
    """The frontier: the version, and every group whose gradient is part of it."""

    version: int
    trained: list[int]


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the one before is untouched."""


def save(trainer: Trainer, run: Path, trained: set[int], keep: int) -> Path:
    """Write ``RUN/checkpoints/vNNNNNN``. Raises CheckpointError with the cause (a full disk, no permission)."""
    folder = run / "checkpoints" / f"v{trainer.version:06d}"
    draft = folder.with_suffix(".draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        names = list(trainer.policy.trained())
        weights = {name: p.detach().cpu().contiguous() for name, p in trainer.policy.trained().items()}
        save_file(weights, draft / "trained.safetensors")
        save_file(_optimizer_tensors(trainer, names), draft / "optimizer.safetensors")
        state = msgspec.json.encode(State(trainer.version, sorted(trained)))
        with (draft / "state.json").open("wb") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written ({error}); the one before is untouched: free some space, then resume"
        ) from error
    for old in sorted(folder.parent.glob("v??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _optimizer_tensors(trainer: Trainer, names: list[str]) -> dict[str, torch.Tensor]:
    made = {}
    for name, parameter in zip(names, trainer.parameters, strict=True):
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            made[f"{key}/{name}"] = torch.as_tensor(value).detach().cpu().clone()
    return made


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, if any."""
    found = sorted((run / "checkpoints").glob("v??????"))
    return found[-1] if found else None


def restore(trainer: Trainer, folder: Path) -> State:
    """Put a checkpoint into ``trainer``; returns its frontier. Raises CheckpointError when it does not fit the model."""
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
        weights = load_file(folder / "trained.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged ({error}): delete it to resume from the one before"
        ) from error
    own = trainer.policy.trained()
    if set(own) != set(weights):
        raise CheckpointError(
            f"checkpoint {folder} holds other parameters than the model: were learner.lora or model changed?"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    for name, parameter in own.items():
        entries = {key.split("/", 1)[0]: value for key, value in moments.items() if key.split("/", 1)[1] == name}
        if entries:
            trainer.optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in entries.items()
            }
    trainer.version = state.version
    return state
