"""tools/test: which tests run once more with plain kernels, and that the kernels then are plain ones."""

import os
import subprocess
import sys

import pytest

from tools.check import NUMERICAL, PLAIN_KERNELS, numerical

FIRST = ["-k", "not sglang"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [*FIRST, *NUMERICAL]),
        (["-x"], [*FIRST, "-x", *NUMERICAL]),
        (["tests"], [*FIRST, *NUMERICAL]),
        (["tests/actors"], [*FIRST, *NUMERICAL[1:]]),
        (["tests/learner"], [*FIRST, "tests/learner"]),
        (["-x", "tests/learner/test_head.py::test_one"], [*FIRST, "-x", "tests/learner/test_head.py::test_one"]),
        (["tests/wire"], []),
    ],
)
def test_the_numerical_tests_among_those_that_were_asked_for_run_with_plain_kernels(
    given: list[str], expected: list[str]
) -> None:
    assert numerical(given) == expected


def test_plain_kernels_are_used() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    made = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | PLAIN_KERNELS, capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() in ("DEFAULT", "NO AVX")
