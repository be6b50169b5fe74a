"""What earlier starts of a run have left: weights, checkpoint and journal, which must agree."""

from pathlib import Path

import msgspec

from coppice.common.frontier import Frontier, read
from coppice.common.shards import Shard
from coppice.scheduler.dispatch.weight_sync import Weights
from coppice.scheduler.ledger.journal import Journal
from coppice.wire.faults import DataFault


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
