"""A checkpoint is a folder that appears whole or not at all: weights and optimizer state of every model that trains, version, trained
group ids.

Exactly-once training rests on it: a group is trained iff its id is in the frontier of the checkpoint that is resumed. Written by one
number of ranks, sharded or not, it is read by any other.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError

from learner import shards
from learner.ranks import Ranks
from learner.trainer import Trainer
from wire import atomic


class State(msgspec.Struct, frozen=True):
    """The frontier: the version, every group whose gradient is part of it, and the steps the implicit reward model made.

    lengths: those that the watch compares later ones with.
    """

    version: int
    trained: list[int]
    prm_updates: int = 0
    lengths: dict[str, list[float]] = {}


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the one before is untouched."""


def save(trainer: Trainer, run: Path, trained: set[int], keep: int) -> Path:
    """Write ``RUN/checkpoints/vNNNNNN``. With sharded ranks every rank calls it. Raises CheckpointError with the cause."""
    folder = run / "checkpoints" / f"v{trainer.version:06d}"
    draft, ranks = atomic.draft_of(folder, alone=True), trainer.ranks

    def begin() -> None:
        if ranks.rank == 0:
            atomic.begin(draft)

    def write() -> None:
        for part, (_, stepper) in trainer.parts().items():
            shards.save(draft, part, stepper, ranks)

    def finish() -> None:
        if ranks.rank == 0:
            _finish(trainer, draft, folder, trained, keep)

    for step in (begin, write, finish):
        error = _attempt(step, ranks)
        if error is not None:
            if ranks.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {folder} could not be written ({error}); the one before is untouched: free some space, then resume"
            ) from error
    return folder


def _attempt(step: Callable[[], object], ranks: Ranks) -> Exception | None:
    """Why ``step`` failed, here or on another sharded rank: all of them succeed or all of them fail, and none waits for ever."""
    error: Exception | None = None
    try:
        step()
    except (OSError, SafetensorError) as caught:  # safetensors reports a full disk as its own error
        error = caught
    if ranks.sharded and bool(ranks.add(torch.tensor([float(error is not None)]))) and error is None:
        error = OSError("another rank failed; its log says why")
    return error


def _finish(trainer: Trainer, draft: Path, folder: Path, trained: set[int], keep: int) -> None:
    prm = trainer.prm.updates if trainer.prm is not None else 0
    (draft / "state.json").write_bytes(
        msgspec.json.encode(State(trainer.version, sorted(trained), prm, trainer.watch.lengths.first))
    )
    atomic.finish(draft, folder, durable=True)
    for old in sorted(folder.parent.glob("v??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, if any."""
    found = sorted((run / "checkpoints").glob("v??????"))
    return found[-1] if found else None


def restore_together(trainer: Trainer, folder: Path) -> State:
    """``restore`` on every rank: when one of them cannot, all raise CheckpointError."""
    made: list[State] = []
    error = _attempt(lambda: made.append(restore(trainer, folder)), trainer.ranks)
    if error is not None:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"checkpoint {folder}: {error}")
    return made[0]


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
    except shards.OtherShape as error:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {error}; was learner.lora.rank changed?"
        ) from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(damaged.format(error)) from error
    if trainer.prm is not None:
        trainer.prm.updates = state.prm_updates
    trainer.version = state.version
    trainer.watch.lengths.first |= state.lengths
    return state
