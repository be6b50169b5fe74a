"""Shared fixtures."""

from pathlib import Path

import hypothesis  # noqa: F401 (its pytest plugin imports it at the end of a session, where 3.11 may fail to)
import pytest
import torch

from tests import tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama folder."""
    torch.set_num_threads(1)
    return tiny.save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def gradients():
    """An engine in the same process switches gradients off for good; each test starts with them on."""
    torch.set_grad_enabled(True)
    yield
    torch.set_grad_enabled(True)
