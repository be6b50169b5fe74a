"""A checkpoint is a folder that appears whole or not at all: weights and optimizer state of every model that trains, version, trained
group ids.

Exactly-once training rests on it: a group is trained iff its id is in the frontier of the checkpoint that is resumed. Written by one
number of ranks, sharded or not, it is read by any other.
"""

import os
import shutil
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from learner import shards
from learner.trainer import Trainer


class State(msgspec.Struct, frozen=True):
    """The frontier: the version, every group whose gradient is part of it, and the steps the implicit reward model made."""

    version: int
    trained: list[int]
    prm_updates: int = 0


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the one before is untouched."""


def save(trainer: Trainer, run: Path, trained: set[int], keep: int) -> Path:
    """Write ``RUN/checkpoints/vNNNNNN``. With sharded ranks every rank calls it. Raises CheckpointError with the cause."""
    folder = run / "checkpoints" / f"v{trainer.version:06d}"
    draft = folder.with_suffix(".draft")
    ranks = trainer.ranks
    try:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        if ranks.sharded:
            ranks.barrier()
        for part, (_, stepper) in trainer.parts().items():
            shards.save(draft, part, stepper, ranks)
        if ranks.sharded:
            ranks.barrier()
        if ranks.rank == 0:
            _finish(trainer, draft, folder, trained, keep)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {folder} could not be written ({error}); the one before is untouched: free some space, then resume"
        ) from error
    return folder


def _finish(trainer: Trainer, draft: Path, folder: Path, trained: set[int], keep: int) -> None:
    prm = trainer.prm.updates if trainer.prm is not None else 0
    (draft / "state.json").write_bytes(msgspec.json.encode(State(trainer.version, sorted(trained), prm)))
    for path in draft.iterdir():  # a power cut after the rename must not leave a checkpoint with holes
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    for old in sorted(folder.parent.glob("v??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, if any."""
    found = sorted((run / "checkpoints").glob("v??????"))
    return found[-1] if found else None


def restore(trainer: Trainer, folder: Path) -> State:
    """Put a checkpoint into ``trainer``; returns its frontier. Raises CheckpointError when it is damaged or of another model."""
    damaged = f"checkpoint {folder} is damaged ({{}}): delete it to resume from the one before"
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
        found = {part: shards.Found(folder, part) for part in trainer.parts()}
    except (OSError, SafetensorError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise CheckpointError(damaged.format(error)) from error
    for part, (_, stepper) in trainer.parts().items():
        stored = {name.partition("/")[2] for name in found[part].names() if name.startswith("weight/")}
        if stored != set(stepper.parameters):
            raise CheckpointError(
                f"checkpoint {folder} holds other parameters of the {part} than the model: were learner.lora, model or scheme"
                " changed?"
            )
    try:
        for part, (_, stepper) in trainer.parts().items():
            shards.load(found[part], stepper)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(damaged.format(error)) from error
    if trainer.prm is not None:
        trainer.prm.updates = state.prm_updates
    trainer.version = state.version
    return state
