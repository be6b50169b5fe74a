"""Real processes over gloo: any number of ranks gives the same update, and a dead rank does not hang the others."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from learner.main import pack_batch, unpack_batch
from tests.updates import batch, process, state, trainer

ROOT = Path(__file__).parent.parent.parent
UPDATES = 2
RANKS = 4

# The modules are imported once, then every rank is a fork of that process: importing costs more than all the updates.
_SCRIPT = """
import json, os, sys, traceback
from pathlib import Path
import msgspec
from safetensors.torch import save_file
from learner.config import LearnerProcess
from learner.main import unpack_batch
from learner.ranks import Ranks
from learner.trainer import Trainer

folder, count, updates = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def work(name, rank, dies):
    ranks = Ranks(30)
    made = Trainer(msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=LearnerProcess), ranks)
    for _ in range(updates):
        payload = ranks.broadcast((folder / "batch").read_bytes() if rank == 0 else None)
        if rank == dies:
            os._exit(9)
        made.update(unpack_batch(payload))
    save_file({n: p.detach().clone() for n, p in made.policy.trained().items()}, folder / f"{name}-{rank}.safetensors")
    ranks.close()


def run(name, port, dies=-1):
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": port}
            try:
                work(name, rank, dies)
            except RuntimeError:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


ports = sys.argv[4:]
codes = {"lora": run("lora", ports[0]), "full": run("full", ports[1]), "dead": run("dead", ports[2], dies=2)}
(folder / "codes.json").write_text(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A folder with the outcome of every scenario: codes.json and the trained weights of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, rank in (("lora", 4), ("full", 0), ("dead", 4)):
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(process(llama, folder, rank, micro_tokens=16)))
    (folder / "batch").write_bytes(pack_batch(batch(5, 0)))
    (folder / "ranks.py").write_text(_SCRIPT)
    probes = [socket.socket() for _ in range(3)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    place = os.environ | {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "ranks.py"), str(folder), str(RANKS), str(UPDATES), *ports]
    subprocess.run(command, env=place, check=True, timeout=300)
    return folder


@pytest.mark.parametrize(("name", "rank"), [("lora", 4), ("full", 0)])
def test_one_rank_and_four_ranks_give_the_same_update(
    ran: Path, tmp_path: Path, llama: Path, name: str, rank: int
) -> None:
    assert json.loads((ran / "codes.json").read_text())[name] == [0] * RANKS
    made = trainer(llama, tmp_path, rank, micro_tokens=16)
    for _ in range(UPDATES):
        made.update(unpack_batch((ran / "batch").read_bytes()))
    alone = state(made)
    first = load_file(ran / f"{name}-0.safetensors")
    for other in range(RANKS):
        for key, value in load_file(ran / f"{name}-{other}.safetensors").items():
            assert torch.equal(value, first[key]), f"rank {other} differs from rank 0 in {key}"
            torch.testing.assert_close(value, alone[key], atol=2e-5, rtol=1e-4)


def test_a_rank_that_dies_in_an_update_ends_the_others_with_an_error(ran: Path) -> None:
    assert json.loads((ran / "codes.json").read_text())["dead"] == [3, 3, 9, 3]
