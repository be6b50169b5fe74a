"""tools/test: what each of its runs leaves out, which tests run once more with plain kernels, and
that the kernels then are plain ones."""

import os
import subprocess
import sys

import pytest

from tests.check import ALL, PLAIN_KERNELS, QUICK, finish, start, steps


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


def test_each_run_leaves_out_what_it_says() -> None:
    quick, normal, everything = steps(["-x", QUICK]), steps([]), steps([ALL])
    assert set(normal) - set(quick) == {"documentation", "pytest, alone", "pytest, plain kernels"}
    assert quick["pytest"][1:3] == ["-m", "not slow and not second"]
    assert normal["pytest, alone"][2:] == ["-m", "alone and not long"]
    assert everything["pytest, alone"][2:] == ["-m", "alone"]
    assert "tests/learner" in everything["pytest, plain kernels"]
    assert list(steps(["-x"]).items())[-1] == ("pytest", ["pytest", "--durations=30", "-x"])


def test_a_check_that_fails_is_named_and_what_it_said_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    check = start("style", ["ruff", "check", "no-such-file.py"], subprocess.PIPE)
    assert finish("style", check) == ["style"]
    assert "no-such-file.py" in capfd.readouterr().out
    assert finish("version", start("version", ["ruff", "--version"])) == []


@pytest.mark.slow
def test_whole_runs_and_tests_of_cuda_are_slow(request: pytest.FixtureRequest) -> None:
    folders = ["tests/e2e", "tests/faults", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not slow", *folders]
    left = subprocess.run(
        command, cwd=request.config.rootpath, capture_output=True, text=True, check=False
    )
    assert left.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, left.stdout
