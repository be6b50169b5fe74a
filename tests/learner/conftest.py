"""What the learner's tests are given."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from coppice.learner.update.trainer import Trainer
from tests.updates import trainer

Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path, llama: Path) -> Make:
    """A trainer of the tiny Llama in the test's own folder, of a LoRA rank and with settings."""
    return partial(trainer, llama, tmp_path)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tensors this small only wait for a second thread
