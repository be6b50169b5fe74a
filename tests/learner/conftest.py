"""What the learner's tests are given."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from coppice.learner.update.trainer import Trainer
from tests.forks import ROOT
from tests.updates import trainer

Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path, llama: Path) -> Make:
    """A trainer of the tiny Llama in the test's own folder, of a LoRA rank and with settings."""
    return partial(trainer, llama, tmp_path)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tensors this small only wait for a second thread


def two_ranks(program: str, *arguments: str, **variables: str) -> list[str]:
    """What each of two ranks prints that runs a program."""
    shared = {name: v for name, v in os.environ.items() if not name.startswith("MASTER_")}
    shared |= {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **variables}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, env=shared | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    return [rank.communicate(timeout=300)[0] for rank in ranks]
