"""Scenarios of several ranks: python rank_process.py FOLDER. FOLDER/scenarios.json names them;
results go beside it.

The modules are imported once, then every rank is a fork of that process: importing costs more than
all the updates.
"""

import os
import sys
import traceback
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from coppice.learner.config import LearnerProcess
from coppice.learner.main import unpack_batch
from coppice.learner.model import checkpoint
from coppice.learner.model.publish import Publisher
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.trainer import Trainer
from tests.learner.forests import forest
from tests.learner.planted import refused
from tests.updates import everything, steady


class Scenario(msgspec.Struct, frozen=True):
    """Ranks that train on a batch some times.

    dies: a rank that exits in the first update; full_disk: one that cannot write its part of the
    checkpoint; resume: a checkpoint's folder; faults: no update, but the self-check of each planted
    fault, whose sentences are written beside the scenarios; publishes: each version, and notes the
    metrics of its update.
    """

    process: LearnerProcess
    batch: str
    count: int
    updates: int
    port: int
    dies: int = -1
    full_disk: int = -1
    resume: str = ""
    faults: bool = False
    publishes: bool = False


class Placing(Ranks):
    """Ranks that note the bytes of the largest model with values that they were given to place."""

    loaded = 0

    def place(self, module: torch.nn.Module, layer: str, compute: torch.dtype) -> torch.nn.Module:
        self.loaded = max(self.loaded, sum(p.nbytes for p in module.parameters() if not p.is_meta))
        return super().place(module, layer, compute)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def work(folder: Path, name: str, scenario: Scenario, rank: int) -> None:
    """One rank: updates, a checkpoint, then the weights of everything that trains."""
    w = scenario.process.learner
    ranks = Placing(30, w.sharding, w.shard_ranks)
    made = steady(Trainer(scenario.process, ranks))
    held = [
        part.to_local() if isinstance(part, DTensor) else part
        for part in made.policy.tower.parameters()
    ]
    (folder / f"{name}-{rank}.bytes").write_bytes(
        msgspec.json.encode([ranks.loaded, sum(p.nbytes for p in held)])
    )
    if scenario.faults:
        (folder / f"{name}-{rank}.faults").write_bytes(
            msgspec.json.encode(refused(made, forest(3)))
        )
        ranks.close()
        return
    if scenario.resume:
        checkpoint.restore(made, Path(scenario.resume))
    publisher = Publisher(made.policy, folder / name, w)
    for _ in range(scenario.updates):
        payload = ranks.broadcast((folder / scenario.batch).read_bytes() if rank == 0 else None)
        if rank == scenario.dies:
            os._exit(9)
        metrics = made.update(msgspec.structs.replace(unpack_batch(payload), version=made.version))
        if scenario.publishes:
            publisher.publish(made.version)
            metrics["checked"] = float(bool(made.checked))
            (folder / f"{name}-{rank}.metrics").write_bytes(msgspec.json.encode(metrics))
    if rank == scenario.full_disk:
        checkpoint.shards.save = full
    if (ranks.sharded or rank == 0) and not scenario.publishes:
        checkpoint.save(made, folder / name, [(1, 2, 1)], 3)
    save_file(everything(made), folder / f"{name}-{rank}.safetensors")
    ranks.barrier()
    ranks.close()


def run(folder: Path, name: str, scenario: Scenario) -> list[int]:
    children = []
    for rank in range(scenario.count):
        pid = os.fork()
        if pid == 0:
            size = str(scenario.count)
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
            }  # fmt: skip
            os.environ["MASTER_PORT"] = str(scenario.port)
            try:
                work(folder, name, scenario, rank)
            except checkpoint.CheckpointError as error:
                (folder / f"{name}-{rank}.error").write_text(str(error))
                os._exit(4)
            except RuntimeError:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    scenarios = msgspec.json.decode(
        (place / "scenarios.json").read_bytes(), type=dict[str, Scenario]
    )
    codes = {name: run(place, name, scenario) for name, scenario in scenarios.items()}
    (place / "codes.json").write_bytes(msgspec.json.encode(codes))
