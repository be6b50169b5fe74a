"""A checkpoint is a folder with the weights and optimizer state of every model that trains, the version and the trained group ids. The
folder appears complete or not at all.

Exactly-once training depends on checkpoints: a group is trained if and only if its id is in the frontier of the resumed checkpoint. Any number
of ranks, sharded or not, can read a checkpoint that any other number has written.
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
    """The frontier. trained: every group whose gradient is part of the version. prm_updates: steps that the implicit reward model made.

    lengths: the first trajectory lengths, with which the watch compares later lengths. kl_factor: the adaptive factor of the KL's weights.
    """

    version: int
    trained: list[int]
    prm_updates: int = 0
    lengths: dict[str, list[float]] = {}
    kl_factor: float = 1.0


class CheckpointError(OSError):
    """A checkpoint could not be written or read. The checkpoint before is untouched."""


def save(trainer: Trainer, run: Path, trained: set[int], keep: int) -> Path:
    """Write ``RUN/checkpoints/vNNNNNN``. If the ranks are sharded, every rank must call this. Raises CheckpointError with the cause."""
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
    """Run ``step`` and return the error, here or on another sharded rank. All ranks succeed or all fail, and none waits for ever."""
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
        msgspec.json.encode(
            State(trainer.version, sorted(trained), prm, trainer.watch.lengths.first, trainer.kl_factor)
        )
    )
    atomic.finish(draft, folder, durable=True)
    for old in sorted(folder.parent.glob("v??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def newest(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, if there is one."""
    folders = sorted((run / "checkpoints").glob("v??????"))
    return folders[-1] if folders else None


def restore_together(trainer: Trainer, folder: Path) -> State:
    """Call ``restore`` on every rank. If it fails on one rank, all ranks raise CheckpointError."""
    states: list[State] = []
    error = _attempt(lambda: states.append(restore(trainer, folder)), trainer.ranks)
    if error is not None:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"checkpoint {folder}: {error}")
    return states[0]


def restore(trainer: Trainer, folder: Path) -> State:
    """Load a checkpoint into ``trainer`` and return its frontier. Raises CheckpointError if it is damaged or belongs to another model."""
    damaged = f"checkpoint {folder} is damaged ({{}}): delete it to resume from the one before"
    try:
        state = msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
        stored = {part: shards.StoredPart(folder, part) for part in trainer.parts()}
    except (OSError, SafetensorError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise CheckpointError(damaged.format(error)) from error
    for part, (_, stepper) in trainer.parts().items():
        names = {name.partition("/")[2] for name in stored[part].names() if name.startswith("weight/")}
        if names != set(stepper.parameters):
            raise CheckpointError(
                f"checkpoint {folder} holds other parameters of the {part} than the model: were learner.lora, model or scheme"
                " changed?"
            )
    try:
        for part, (_, stepper) in trainer.parts().items():
            shards.load(stored[part], stepper)
    except shards.OtherShape as error:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {error}; was learner.lora.rank changed?"
        ) from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(damaged.format(error)) from error
    if trainer.prm is not None:
        trainer.prm.updates = state.prm_updates
    trainer.version, trainer.kl_factor = state.version, state.kl_factor
    trainer.watch.lengths.first |= state.lengths
    return state
