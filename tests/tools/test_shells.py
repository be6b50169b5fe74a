"""coppice completion prints scripts with which real shells complete the command coppice."""

import subprocess
import sys
from pathlib import Path

import pytest

from coppice.tools.bootstrap import ROOT

pytestmark = pytest.mark.slow
CASES = [
    ("coppice trees --ht", "--html"),
    ("coppice sft collect --split held", "heldout"),
    ("coppice trees runs/on", "runs/one"),
]
BASH = """
source "$1"
COMP_LINE=$2 COMP_WORDS=($2) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
[[ $(complete -p "${COMP_WORDS[0]}") =~ -F\\ ([^ ]+) ]] && "${BASH_REMATCH[1]}" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's, with a run, and the three scripts."""
    place = tmp_path_factory.mktemp("project")
    (place / "runs" / "one").mkdir(parents=True)
    for name in ("tools", "configs", "README.md"):
        (place / name).symlink_to(ROOT / name)
    for shell in ("bash", "fish", "zsh"):  # the shells of the latter two are rarely here
        start = "from coppice.tools.main import main; main()"
        command = [sys.executable, "-c", start, "completion", shell]
        with (place / f"script.{shell}").open("w") as script:
            subprocess.run(command, stdout=script, check=True)
    return place


def completed(command: list[str], folder: Path) -> list[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return [line.split("\t")[0].rstrip("/") for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_bash_completes(typed: str, expected: str, folder: Path) -> None:
    assert completed(["bash", "-c", BASH, "bash", "script.bash", typed], folder) == [expected]
