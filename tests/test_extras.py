"""The package index has a solution for all extras together, and so for those of the pages."""

import re
import subprocess
import sys

import pytest

from tests.forks import ROOT

ALL = "models dev ray tracking agents environments"


@pytest.mark.long  # a release is what is installed, and the index changes without us
@pytest.mark.parametrize(
    "given", [f"extra cpu fuzz {ALL}", f"extra gpu {ALL}", "group sglang", "group vllm"]
)
def test_what_is_installed_together_has_a_solution(given: str) -> None:
    kind, *names = given.split()
    ask = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--native-tls"]
    command += [] if kind == "group" else [str(ROOT / "pyproject.toml")]
    command += [word for name in names for word in (f"--{kind}", name)]
    command += ["--index-url", *index] if index else []
    solved = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if solved.returncode and not re.search("No solution|not found", solved.stderr):
        pytest.skip(f"the package index cannot be asked: {solved.stderr[-300:]}")
    assert solved.returncode == 0, solved.stderr
    assert "\ntorch==" in solved.stdout
