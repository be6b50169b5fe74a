"""A hundred faults of every kind strike whole runs, and nothing is lost."""

import subprocess
import sys
from pathlib import Path

from coppice.research.chaos.plan import KINDS

ROOT = Path(__file__).parent.parent.parent


def test_a_hundred_faults_lose_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        *("-m", "coppice", "dev", "chaos"),
        "--faults",
        "100",
        "--seed",
        "1",
        "--out",
        str(tmp_path / "chaos"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "every invariant holds"
    left_out = {"full", "read-only"} if "no disk can be mounted" in done.stdout else set()
    survived = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.split()[:1] and line.split()[0] in KINDS
    }
    assert set(survived) == set(KINDS) - left_out
    assert all(struck == ended for struck, ended in survived.values())
