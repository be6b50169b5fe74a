"""One learner on two nodes, as docs/learner.md starts it: two torchruns with two ranks of
``learner.main`` each give what one rank gives."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coppice.common.process import free_port
from coppice.learner.model import checkpoint
from coppice.learner.model.shards import StoredPart
from coppice.learner.update.trainer import Batch
from tests.learner.test_leader import trained
from tests.services import bench
from tests.updates import groups, process, trainer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LONG_S = 100.0


def torchrun(node: int, meeting: list[str], file: Path) -> subprocess.Popen[bytes]:
    """The agent of one node with its two ranks."""
    place = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shape = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", *meeting]
    command = [
        sys.executable, "-m", "torch.distributed.run", *shape, "-m", "coppice.learner.main",
        str(file),
    ]  # fmt: skip
    return subprocess.Popen(command, env=os.environ | place, cwd=ROOT)


async def test_two_nodes_of_two_ranks_have_the_moments_of_one_rank(
    tmp_path: Path, llama: Path
) -> None:
    settings: dict[str, Any] = {"count": 4, "sharding": "fsdp", "collective_timeout_s": 60.0}
    learner = process(llama, tmp_path, 0, micro_tokens=16, **settings)
    file = tmp_path / "learner.json"
    file.write_bytes(msgspec.json.encode(learner))
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    some, nodes = groups(7)
    async with bench(tmp_path) as here:
        (tmp_path / "endpoint").write_text(here.dispatcher.endpoint)
        agents = [torchrun(node, meeting, file) for node in (0, 1)]
        try:
            await here.dispatcher.wait_for("train", 1, LONG_S)
            assert [each.version for each in await trained(here.dispatcher, some)] == [1] * 3
            await here.dispatcher.roster.drain()
            assert [await asyncio.to_thread(agent.wait, 180) for agent in agents] == [0, 0]
        finally:
            for agent in agents:
                agent.kill()
    folder = tmp_path / "checkpoints" / "v000001"
    assert len(list(folder.glob("policy-*.safetensors"))) == 4
    alone = trainer(llama, tmp_path, 0, micro_tokens=16)
    alone.update(Batch(0, 3, some, nodes))
    stored, moved = StoredPart(folder, "policy"), 0.0
    for name, parameter in alone.stepper.parameters.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = alone.stepper.adamw.state[parameter][moment]
            moved += float(expected.abs().sum())
            torch.testing.assert_close(
                stored.rows(f"{moment}/{name}", expected), expected, rtol=1e-3, atol=1e-7
            )
    assert moved > 0.1
    again = trainer(llama, tmp_path, 0)
    assert checkpoint.restore(again, folder).groups() == dict.fromkeys(
        (group.id for group in some), 1
    )
