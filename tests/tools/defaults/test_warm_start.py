"""The warm start is one policy: made on another processor, it differs in a few weights, each by a
rounding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.check import PLAIN_KERNELS

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from coppice.tools.defaults import warm_start
from coppice.learner.fine_tune import Example

rng = np.random.default_rng(0)
examples = lambda count: [Example(rng.integers(0, 256, 40).tolist(), 20) for _ in range(count)]
model, cache = map(Path, sys.argv[1:])
config = warm_start.WarmStart(steps=8, rows=4, lr=4e-3)
if __name__ == "__main__":
    print(warm_start.from_play(model, "random tokens", [], [], examples, config, cache, 1))
"""


def made(model: Path, cache: Path, kernels: dict[str, str]) -> dict[str, torch.Tensor]:
    """The weights of a warm start that a process of its own makes."""
    script = cache / "program.py"
    cache.mkdir()
    script.write_text(PROGRAM)
    environment = os.environ | kernels | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(script), str(model), str(cache)]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return load_file(Path(said.splitlines()[-1]) / "model.safetensors")


@pytest.mark.slow
def test_a_warm_start_made_with_other_kernels_is_the_same_policy(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model")
    before = load_file(model / "model.safetensors")
    ours, theirs = (
        made(model, tmp_path / "here", {}),
        made(model, tmp_path / "there", PLAIN_KERNELS),
    )
    assert all(weight.dtype == torch.bfloat16 for weight in ours.values())
    apart = sum(int((ours[name] != theirs[name]).sum()) for name in ours)
    moved = sum(int((ours[name] != before[name].bfloat16()).sum()) for name in ours)
    assert moved > 0.5 * sum(weight.numel() for weight in ours.values())
    assert apart < 0.01 * moved
