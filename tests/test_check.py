"""tools/test: the kernels of its second run are plain ones, and which tests are slow."""

import os
import subprocess
import sys

import pytest

from tests.check import PLAIN_KERNELS


@pytest.mark.slow
def test_plain_kernels_are_used() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    made = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | PLAIN_KERNELS,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() in ("DEFAULT", "NO AVX")


@pytest.mark.slow
def test_whole_runs_and_tests_of_cuda_are_slow(request: pytest.FixtureRequest) -> None:
    folders = ["tests/e2e", "tests/faults", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not slow", *folders]
    left = subprocess.run(
        command, cwd=request.config.rootpath, capture_output=True, text=True, check=False
    )
    assert left.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, left.stdout
