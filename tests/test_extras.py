"""The package index has a solution for each combination of extras that the pages name."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Not here: agents or dev beside sglang, whose wheel pins an older openai. It gets an environment of its own.
COMBINATIONS = (
    "cpu",
    "gpu",
    "cpu models dev",
    "gpu models dev",
    "gpu ray tracking agents environments webshop",
    "cpu ray tracking agents environments webshop fuzz",
    "sglang",
)


@pytest.mark.slow
@pytest.mark.parametrize("extras", COMBINATIONS)
def test_the_extras_can_be_installed_together(extras: str) -> None:
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        str(ROOT / "pyproject.toml"),
    ]
    command += [word for extra in extras.split() for word in ("--extra", extra)]
    command += ["--index-url", *index] if index else []
    solved = subprocess.run(command, capture_output=True, text=True, check=False)
    assert solved.returncode == 0, solved.stderr
    assert "\ntorch==" in solved.stdout
