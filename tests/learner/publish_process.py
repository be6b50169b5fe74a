"""Ranks that publish a policy: python publish_process.py FOLDER MODE COUNT, with MASTER_ADDR and
MASTER_PORT. FOLDER/process.json is the learner's; beside it each rank writes its log, and rank 0
the truth of each version. Ranks are forks, because importing costs more than all they do."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from coppice.learner.config import LearnerProcess
from coppice.learner.model import publish
from coppice.learner.model.model import TreeModel
from coppice.learner.model.publish import Publisher
from coppice.learner.model.ranks import Lookout, Ranks, own_rows

SHARES = (1.0, 0.02, 0.0, 0.02, 0.02, 0.02, 0.9)
"""Which share of the weights changes before each version."""


def change(policy: TreeModel, share: float, seed: int) -> None:
    """Add to a share of this rank's rows."""
    draw = torch.Generator().manual_seed(100 * seed + policy.ranks.rank)
    with torch.no_grad():
        for parameter in policy.trained().values():
            rows = own_rows(parameter)[0]
            chosen = torch.rand(rows.shape, generator=draw) < share
            rows += chosen * torch.randn(rows.shape, generator=draw)


def main(folder: Path, mode: str) -> None:
    """publish: all versions; killed: ends in the second; dies, stops: a rank, outside of any
    collective."""
    process = msgspec.json.decode((folder / "process.json").read_bytes(), type=LearnerProcess)
    w, Lookout.silent_s = process.learner, 3.0
    ranks = Ranks(60, w.sharding, w.shard_ranks)
    if mode in ("dies", "stops"):
        ranks.barrier()
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if mode == "dies" else signal.SIGSTOP)
        time.sleep(60)
    policy = TreeModel(process.model, w, 1.0, ranks)
    publisher, shown = Publisher(policy, folder, w), dict[str, list[str]]()
    for version, share in enumerate(SHARES, 1):
        change(policy, share if policy.ranks.shards > 1 or ranks.rank == 0 else 0.0, version)
        if mode == "killed" and version == 2:
            publish.published.following = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        result = publisher.publish(version)
        whole = {name: one.to(policy.compute) for name, one in policy.gathered().items()}
        if result is not None:
            save_file(whole, folder / f"truth-{version}.safetensors")
            held = sorted(path.name for path in (folder / "weights").iterdir())
            shown[str(version)] = [result.path, result.digest, *held]
            (folder / "shown.json").write_bytes(msgspec.json.encode(shown))
    ranks.close()


def forked(folder: Path, mode: str, rank: int, count: int) -> int:
    """Start a rank and return its process."""
    if pid := os.fork():
        return pid
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), rank)
    names |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), count)
    os.environ |= {name: str(value) for name, value in names.items()}
    os.dup2(os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    faulthandler.enable()
    try:
        main(folder, mode)
        os._exit(0)
    finally:  # no fork returns
        traceback.print_exc()
        os._exit(3)


if __name__ == "__main__":
    place, how = Path(sys.argv[1]), sys.argv[2]
    children = [forked(place, how, rank, int(sys.argv[3])) for rank in range(int(sys.argv[3]))]
    codes: list[int] = []
    for number, child in enumerate(children):
        if number == 1 and how == "stops":
            os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    (place / "codes.json").write_bytes(msgspec.json.encode(codes))
