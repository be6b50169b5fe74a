"""The learning rate by name, and the critic's warm-up with a frozen policy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.learner.config import OptimizerConfig
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from tests.updates import episodes, everything, trainer


def rates(updates: int, warmup: int, decay: int, schedule: Any, **settings: Any) -> list[float]:
    config = OptimizerConfig(8.0, warmup, decay, (0.9, 0.999), 0.0, 1.0, schedule, **settings)
    stepper = Stepper("policy", {"w": torch.nn.Parameter(torch.zeros(1))}, config, Ranks(60))
    return [stepper.rate(version) for version in range(updates)]


def test_each_schedule_has_its_rates() -> None:
    assert rates(7, 2, 6, "constant") == [4, 8, 8, 8, 8, 8, 8]
    assert rates(8, 2, 6, "linear") == [4, 8, 8, 6, 4, 2, 0, 0]
    assert rates(8, 2, 6, "linear", min_ratio=0.5) == [4, 8, 8, 7, 6, 5, 4, 4]
    # cos(pi / 4) = .7071, so a half of 1.7071 and of .2929
    cosine = [4, 8, 8, 8 * 0.85355, 4, 8 * 0.14645, 0, 0]
    assert rates(8, 2, 6, "cosine") == pytest.approx(cosine, abs=1e-4)
    assert rates(8, 2, 6, "cosine", min_ratio=0.25) == pytest.approx(
        [4, 8, *(2 + 0.75 * c for c in cosine[2:])], abs=1e-4
    )


def test_updates_without_a_step_do_not_use_up_the_schedule() -> None:
    assert rates(9, 2, 7, "linear", frozen_updates=1)[1:] == [4, 8, 8, 6, 4, 2, 0, 0]


def test_the_critic_trains_alone_while_it_warms_up(tmp_path: Path, llama: Path) -> None:
    critic = {"lr": 1e-2, "policy_frozen_updates": 2}
    made = trainer(llama, tmp_path, scheme="gae", critic=critic, warmup_updates=2)
    before = everything(made)
    for version in range(2):
        metrics = made.update(episodes(version, version))
        assert metrics["learner/skipped"] == 1
        assert metrics["critic/grad_norm"] > 0
    changed = {
        name.split("/")[0]
        for name, p in everything(made).items()
        if not torch.equal(p, before[name])
    }
    assert (changed, made.version) == ({"critic"}, 2)
    # the first of the policy's own warm-up
    assert made.update(episodes(2, 2))["learner/lr"] == pytest.approx(0.005)
    changed = {
        name.split("/")[0]
        for name, p in everything(made).items()
        if not torch.equal(p, before[name])
    }
    assert changed == {"critic", "policy"}
