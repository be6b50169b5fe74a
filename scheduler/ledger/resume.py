"""What earlier starts of a run have left: weights, checkpoint and journal, which must agree; and
what their trees were made from."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from coppice.common.frontier import Frontier, read
from coppice.common.shards import Shard
from coppice.scheduler.ledger.journal import REMEDY, Inputs, Journal
from coppice.wire import digest
from coppice.wire.faults import DataFault
from coppice.wire.published import Weights

DRAWN_BY = "seed", "data.train", "data.heldout", "hops_in_turn", "verbatim"
"""The beginnings of keys that no resume may change."""


def edited(old: Inputs, new: Inputs) -> Iterator[tuple[str, str]]:
    """Yield the key of each input that is another one now, and how the two differ."""
    for key, (value, now) in new.items():
        if (was := old.get(key, ("", now))[1]) != now:
            yield key, f"{key} ({value}) was {was[:12]} and is {now[:12]} now"


def begin(journal: Journal, inputs: dict[str, str]) -> Iterator[str]:
    """Record a start of a run in its journal, all of which is read first. Yields what a user should
    know. inputs: values and paths. Raises DataFault if older trees were drawn by others."""
    if damage := journal.damage():
        what = f"journal {journal.path} is damaged in {len(damage)} rows, the first {damage[0]}"
        if damage[0].endswith(" of trees"):  # which say what was drawn
            raise DataFault(f"{what}: restore it from a copy, then resume the run")
        yield f"{what}: {REMEDY}"
    new: Inputs = {}
    for key, value in inputs.items():  # a long value would be an error for Path.is_file
        new[key] = value, digest.file(Path(value), drop=False) if os.path.isfile(value) else value
    for *_, old in journal.starts()[-1:]:
        for key, how in edited(old, new):
            if key.startswith(DRAWN_BY):
                remedy = "put the former one back, or begin another run"
                raise DataFault(f"{how}, and the run's tasks were drawn by it: {remedy}")
            yield f"{how}: older trees were made by the former one"
    journal.begin(new)


def check(run: Path, resumed: bool) -> None:
    """Raise DataFault if the folder has checkpoints although nothing was journaled before."""
    checkpoints = sorted((run / "checkpoints").glob("v??????"))
    if checkpoints and not resumed:
        version = int(checkpoints[-1].name[1:])
        raise DataFault(
            f"{run} holds weights of version {version} and an empty journal: they belong to another"
            " run; choose another folder, or remove this one while nothing runs in it"
        )


def announced(run: Path) -> tuple[Weights, dict[int, int]]:
    """The learner's newest weights, and the version of each group since its checkpoint."""
    path = run / "learner.json"
    said = path.read_bytes() if path.exists() else b"{}"
    groups = msgspec.json.decode(said, type=Frontier).groups()
    return msgspec.json.decode(said, type=Weights), groups


def settled(run: Path, version: int) -> int:
    """The newest version, up to ``version``, before which no resume goes back: the oldest
    checkpoint holds it. 0 if there is none."""
    oldest = min((run / "checkpoints").glob("v??????"), default=None)
    return min(version, int(oldest.name[1:])) if oldest is not None else 0


def adopt(run: Path, version: int, journal: Journal, shard: Shard) -> Frontier:
    """Mark in the journal what the checkpoint of the learner's ``version`` has trained, and nothing
    else: the rest is sent again. Returns the checkpoint's frontier. Raises DataFault if it cannot
    be read, or if the journal is older than it is."""
    try:
        checkpoint = read(run, version)
    except (OSError, ValueError) as error:
        raise DataFault(
            f"the frontier of version {version} in {run}/checkpoints cannot be read ({error}):"
            " resume again, and the learner sets the checkpoint aside if it is damaged"
        ) from None
    durable = shard.own(checkpoint.groups())
    if lost := journal.lacks(durable):
        raise DataFault(
            f"the journal lacks {len(lost)} groups (first group {lost[0]}) that the checkpoint of"
            f" version {checkpoint.version} has trained, so it is an older one: restore its newest"
            f" copy, or move the newest folders of {run}/checkpoints away and lose their training"
        )
    journal.forget_training_after(checkpoint.version)
    journal.adopt_frontier(durable)
    return checkpoint
