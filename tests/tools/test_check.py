"""tools/test: which tests run once more with plain kernels, and that the kernels then are plain
ones."""

import os
import subprocess
import sys

import pytest

from coppice.tools.check import (
    NUMERICAL,
    PLAIN_KERNELS,
    PROCESSES,
    QUICK,
    finish,
    numerical,
    start,
    steps,
)

FIRST = ["-k", "not sglang"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [*FIRST, *NUMERICAL]),
        (["-x"], [*FIRST, "-x", *NUMERICAL]),
        (["tests"], [*FIRST, *NUMERICAL]),
        (["tests/actors"], [*FIRST, *NUMERICAL[1:]]),
        (["tests/learner"], [*FIRST, "tests/learner"]),
        (
            ["-x", "tests/learner/test_head.py::test_one"],
            [*FIRST, "-x", "tests/learner/test_head.py::test_one"],
        ),
        (["tests/wire"], []),
    ],
)
def test_the_numerical_tests_among_those_that_were_asked_for_run_with_plain_kernels(
    given: list[str], expected: list[str]
) -> None:
    assert numerical(given) == expected


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


def test_a_quick_check_leaves_out_the_slow_tests_the_site_and_the_second_numerical_run() -> None:
    whole, quick = steps(["-x"]), steps(["-x", QUICK])
    assert set(whole) - set(quick) == {"documentation", "pytest, plain kernels"}
    assert quick["pytest"] == [
        "pytest",
        "-m",
        "not slow",
        "-n",
        str(PROCESSES),
        "--dist",
        "worksteal",
        "-x",
    ]
    assert 1 <= PROCESSES <= 4
    assert whole["pytest"] == ["pytest", "--durations=30", "-x"]


def test_a_check_of_everything_runs_every_test_once_and_what_starts_processes_one_after_the_other() -> (
    None
):
    everything = steps([])
    assert everything["pytest, alone"] == ["pytest", "--durations=60", "-m", "alone"]
    assert everything["pytest"][2:4] == ["-m", "not alone"]
    assert everything["pytest"][4:] == steps([QUICK])["pytest"][3:]
    assert everything["pytest, plain kernels"][-4:] == ["-n", str(PROCESSES), "--dist", "worksteal"]


def test_a_check_that_fails_is_named_and_what_it_said_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert finish(
        "style", start("style", ["ruff", "check", "no-such-file.py"], subprocess.PIPE)
    ) == ["style"]
    assert "no-such-file.py" in capfd.readouterr().out
    assert finish("version", start("version", ["ruff", "--version"])) == []


@pytest.mark.slow
def test_whole_runs_and_tests_with_the_sglang_server_are_slow(
    request: pytest.FixtureRequest,
) -> None:
    collected = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-m",
        "not slow",
        "tests/e2e",
        "tests/faults",
        "tests/gpu",
    ]
    left = subprocess.run(
        collected, cwd=request.config.rootpath, capture_output=True, text=True, check=False
    )
    assert left.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, left.stdout
