"""The ranks of one machine meet at a file and listen on the loopback alone."""

import json
from pathlib import Path

import msgspec
import pytest

from coppice.learner.config import LearnerConfig
from coppice.tools.launching.processes import _meeting
from tests.learner.conftest import two_ranks

RANK = """
import json, os, psutil, torch
from coppice.learner.model.ranks import Ranks
ranks = Ranks(60)
told = ranks.broadcast(b"tensors only" if ranks.rank == 0 else None).decode()
total = float(ranks.add(torch.ones(1) * (ranks.rank + 1)))
listening = (c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN")
open_ = [c.laddr.ip for c in listening]
print(json.dumps([told, total, open_]))
ranks.barrier()
ranks.close()
"""


UNUSED = """
import json, torch
from coppice.learner.model.ranks import Ranks
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.text = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x, picture):
        return self.text(self.tower(x) if picture else x)
ranks = Ranks(60, "fsdp")
model = ranks.place(Model(), "Layer", torch.float32)
model(torch.ones(1, 4), ranks.rank == 0).sum().backward()
print(json.dumps([float(p.grad.full_tensor().abs().sum()) > 0 for p in model.parameters()]))
ranks.close()
"""


@pytest.mark.slow
def test_a_rank_without_pictures_takes_part_in_the_towers_gradient(tmp_path: Path) -> None:
    for said in two_ranks(UNUSED, **_meeting(tmp_path, LearnerConfig())):
        assert json.loads(said.splitlines()[-1]) == [True] * 4


def test_the_ranks_leave_the_loopback_only_for_an_address_that_the_user_named() -> None:
    run = Path("nowhere")
    named = {"publish_host": "10.0.0.1"}
    for loopback in ({}, {"publish": "memory"}, named):
        config = msgspec.convert(loopback, LearnerConfig)
        assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= _meeting(run, config).keys()
    left = msgspec.convert({"publish": "memory", **named}, LearnerConfig)
    assert "GLOO_SOCKET_IFNAME" not in _meeting(run, left)


@pytest.mark.slow
def test_two_ranks_meet_at_the_file_and_listen_only_on_the_loopback(tmp_path: Path) -> None:
    for said in two_ranks(RANK, **_meeting(tmp_path, LearnerConfig())):
        told, total, listening = json.loads(said.splitlines()[-1])
        assert (told, total) == ("tensors only", 3.0)
        assert listening  # gloo's own connections
        assert set(listening) <= {"127.0.0.1", "::1"}
