"""tools/test: what is marked slow, and that plain kernels are plain ones."""

import os
import subprocess
import sys

import pytest

from tests.check import PLAIN_KERNELS
from tests.conftest import pytest_collection_modifyitems
from tests.forks import ROOT


@pytest.mark.slow
def test_plain_kernels_are_used() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    kernels = os.environ | PLAIN_KERNELS
    said = subprocess.check_output([sys.executable, "-c", program], env=kernels, text=True)
    assert said.strip() in ("DEFAULT", "NO AVX")


@pytest.mark.parametrize(
    ("place", "marks"), [("e2e/test_run.py", "slow alone"), ("gpu/test_learner_cuda.py", "slow")]
)
def test_whole_runs_and_tests_of_cuda_are_slow(
    place: str, marks: str, request: pytest.FixtureRequest
) -> None:
    module = pytest.Module.from_parent(request.session, path=ROOT / "tests" / place)
    item = pytest.Function.from_parent(module, name="test", callobj=lambda: None)
    pytest_collection_modifyitems(request.config, [item])
    assert {mark.name for mark in item.iter_markers()} == set(marks.split())
