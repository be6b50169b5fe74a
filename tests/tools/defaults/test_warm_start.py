"""A warm start made on another processor differs in a few weights, each by a rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coppice.learner.fine_tune import Example
from coppice.tools.defaults import warm_start
from coppice.tools.defaults.settings import WarmStart
from tests import tiny
from tests.check import PLAIN_KERNELS


def made(model: Path, cache: Path) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)

    def examples(count: int) -> list[Example]:
        return [Example(rng.integers(0, 256, 40).tolist(), 20) for _ in range(count)]

    config = WarmStart(steps=8, rows=4, lr=4e-3)
    out = warm_start.from_play(model, "random tokens", [], [], examples, config, cache, 1)
    return load_file(out / "model.safetensors")


@pytest.mark.slow
def test_a_warm_start_made_with_other_kernels_is_the_same_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save(tmp_path / "model")
    before = load_file(model / "model.safetensors")
    ours = made(model, tmp_path / "here")
    for name, value in PLAIN_KERNELS.items():
        monkeypatch.setenv(name, value)
    theirs = made(model, tmp_path / "there")
    assert all(weight.dtype == torch.bfloat16 for weight in ours.values())
    apart = sum(int((ours[name] != theirs[name]).sum()) for name in ours)
    moved = sum(int((ours[name] != before[name].bfloat16()).sum()) for name in ours)
    assert moved > 0.5 * sum(weight.numel() for weight in ours.values())
    assert apart < 0.01 * moved
