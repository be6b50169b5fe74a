"""A checkpoint is a folder with the weights and optimizer state of every model that trains, what
the watch and the adaptive KL remember, and the frontier: which version trained which groups.

Exactly-once training depends on it: a group is trained if and only if the frontier of the resumed
checkpoint holds it. Every file is on the disk before the folder has its name, and its digest is in
SHA256SUMS. The checkpoint before is removed only when the new one was read back. A damaged one is
set aside and the one before is restored; the journal then sends the groups that it lacks again. Any
number of ranks, sharded or not, can read what any other number has written.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError

from coppice.common import atomic, frontier
from coppice.learner.model import shards
from coppice.learner.model.publish import announced
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.trainer import Trainer
from coppice.learner.update.watch import WatchState
from coppice.wire import digest

log = logging.getLogger("learner.checkpoint")

DAMAGED = ".damaged"
"""The end of the name of a checkpoint that could not be read; it is kept for inspection."""


class State(frontier.Frontier, frozen=True):
    """The frontier and what the trainer remembers. prm_updates: the reward model's steps so far.
    kl_factor: the adaptive factor of the KL's weights. watch: what it compares with."""

    prm_updates: int = 0
    kl_factor: float = 1.0
    watch: WatchState = msgspec.field(default_factory=WatchState)


class CheckpointError(OSError):
    """A checkpoint could not be written or read. The checkpoint before is untouched."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written: a file is missing, cut short or changed."""


def save(
    trainer: Trainer, run: Path, trained: list[tuple[int, int, int]], keep: int,
    records: dict[int, dict[str, float]] | None = None,
) -> Path:  # fmt: skip
    """Write ``RUN/checkpoints/vNNNNNN``. If the ranks are sharded, every rank must call this.
    Raises CheckpointError with the cause.

    trained: runs of groups, as in ``Frontier``. records: metrics of the newest updates, by version.
    """
    folder = run / "checkpoints" / f"v{trainer.version:06d}"
    draft, ranks = atomic.draft_of(folder, alone=True), trainer.ranks

    def begin() -> None:
        if ranks.rank == 0:
            atomic.begin(draft)

    def write() -> None:
        for part, (_, stepper) in trainer.parts().items():
            shards.save(draft, part, stepper, ranks)
        own = sorted(draft.glob(f"*-{ranks.rank:05d}.*"))
        for path in own:  # here, because only the machine that wrote a file can wait for it
            atomic.sync(path)
        digests = {path.name: digest.file(path) for path in own}
        (draft / f"sums-{ranks.rank:05d}").write_bytes(msgspec.json.encode(digests))

    def finish() -> None:
        if ranks.rank != 0:
            return
        prm = trainer.prm.updates if trainer.prm is not None else 0
        watch = trainer.watch.state
        state = State(trainer.version, trained, records or {}, prm, trainer.kl_factor, watch)
        (draft / frontier.FILE).write_bytes(msgspec.json.encode(state))
        digests = {frontier.FILE: digest.file(draft / frontier.FILE)}
        for own in sorted(draft.glob("sums-?????")):
            digests |= msgspec.json.decode(own.read_bytes(), type=dict[str, str])
            own.unlink()
        digest.write_sums(draft, digests)
        atomic.finish(draft, folder, durable=True)

    def prove() -> None:
        _verify(folder, ranks.rank, ranks.count if ranks.sharded else 1)

    for step in (begin, write, finish, prove):
        if error := _attempt(step, folder, ranks, ranks.sharded):
            if ranks.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
                if step is prove:
                    _set_aside(folder)
            raise CheckpointError(
                f"checkpoint {folder} could not be written ({error}); the one before is untouched:"
                " free some space, then resume"
            ) from error
    if ranks.rank == 0:
        for old in sorted(folder.parent.glob("v??????"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _attempt(
    step: Callable[[], object], folder: Path, ranks: Ranks, collective: bool
) -> Exception | None:
    """Run ``step`` and return the error, here or, if ``collective``, on another rank. All ranks
    succeed or all fail, and none waits for ever."""
    error: Exception | None = None
    try:
        step()
    except (OSError, SafetensorError) as caught:  # safetensors reports a full disk as its own error
        error = caught
    if collective:
        damaged = isinstance(error, DamagedError)
        anywhere = ranks.add(torch.tensor([float(error is not None), float(damaged)])).tolist()
        if anywhere[1] and not damaged:
            error = DamagedError(
                f"checkpoint {folder} is damaged: another rank could not read it; its log says why"
            )
        elif anywhere[0] and error is None:
            error = OSError("another rank failed; its log says why")
    return error


def _verify(folder: Path, rank: int, count: int) -> None:
    """Compare this rank's share of the files with their digests. Raises DamagedError that names the
    first that differs."""
    with _damage(folder):
        for name, expected in sorted(digest.sums(folder).items())[rank % count :: count]:
            if digest.file(folder / name) != expected:
                raise ValueError(
                    f"{name} is not what was written: its digest differs from {digest.SUMS}"
                )


def _set_aside(folder: Path) -> None:
    kept = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(kept, ignore_errors=True)  # an earlier one of the same version
    folder.rename(kept)


def restore_newest(trainer: Trainer, run: Path) -> tuple[State, list[str]]:
    """Restore the newest checkpoint that is whole, on every rank. Returns its state (version 0 if
    there is none) and warnings: of each damaged one, which is set aside, or that there is none of a
    run that was updated. Raises CheckpointError if
    all are damaged, or if the whole one belongs to another model."""
    damaged: list[tuple[Path, str]] = []
    trainer.undone = range(1, announced(run) + 1)
    for folder in sorted((run / "checkpoints").glob("v??????"), reverse=True):
        try:
            state = restore(trainer, folder)
            trainer.undone = range(state.version + 1, trainer.undone.stop)
        except DamagedError as error:
            damaged.append((folder, str(error)))
            continue
        for broken, _ in damaged if trainer.ranks.rank == 0 else ():
            _set_aside(broken)
        warnings = [
            f"{reason}. It is set aside as {broken.name}{DAMAGED}, and training goes on from"
            f" version {state.version}"
            for broken, reason in damaged
        ]
        for warning in warnings:
            log.warning("%s", warning)
        return state, warnings
    reasons = [reason for _, reason in damaged]
    reasons += [f"{old} is damaged" for old in (run / "checkpoints").glob(f"v??????{DAMAGED}")]
    if reasons:
        raise CheckpointError(
            f"no checkpoint of {run} can be read: {reasons[0]}. Copy one back from a backup; or"
            f" remove {run}/checkpoints, and the resumed run trains its whole journal again from"
            " version 0"
        )
    if not trainer.undone:
        return State(), []
    lost = (
        f"{run} has no checkpoint: its {len(trainer.undone)} updates are trained again from"
        " version 0"
    )
    return State(), [lost]


def restore(trainer: Trainer, folder: Path) -> State:
    """Load a checkpoint into ``trainer`` and return its state. Every rank must call this; none
    loads a file before each has proven its share of them. Raises DamagedError, or CheckpointError
    if the checkpoint belongs to another model, on all ranks."""
    ranks, state = trainer.ranks, State()

    def prove() -> None:
        nonlocal state
        _verify(folder, ranks.rank, ranks.count)
        with _damage(folder):
            state = msgspec.json.decode((folder / frontier.FILE).read_bytes(), type=State)

    for step in (prove, lambda: _load(trainer, folder, state)):
        error = _attempt(step, folder, ranks, ranks.count > 1)
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return state


def _load(trainer: Trainer, folder: Path, state: State) -> None:
    parts = {part: stepper for part, (_, stepper) in trainer.parts().items()}
    with _damage(folder):
        stored = {part: shards.StoredPart(folder, part) for part in parts}
    for part, stepper in parts.items():
        weights = {n.partition("/")[2] for n in stored[part].entries if n.startswith("weight/")}
        if weights != set(stepper.parameters):
            raise CheckpointError(
                f"checkpoint {folder} holds other parameters of the {part} than the model: were"
                " learner.lora, model or scheme changed?"
            )
    with _damage(folder):
        for part, stepper in parts.items():
            shards.load(stored[part], stepper)
    if trainer.prm is not None:
        trainer.prm.updates = state.prm_updates
    trainer.version, trainer.kl_factor = state.version, state.kl_factor
    trainer.watch.state = state.watch


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Raise what goes wrong while a checkpoint is read as a CheckpointError or DamagedError."""
    try:
        yield
    except shards.OtherShape as error:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {error}; was learner.lora.rank changed?"
        ) from error
    except (OSError, SafetensorError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {error}") from error
