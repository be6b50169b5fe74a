"""The command tools/test: ruff, pyright, pytest; all run, the first failure decides the exit status.

The numerical tests run twice: with the kernels that torch chooses for this processor, and with those for any processor, which sum in
another order and emulate bfloat16. So a bound that holds on one kind of machine only fails on every machine.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.bootstrap import ROOT

PLAIN_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Of torch itself and of the two libraries that multiply matrices for it."""
NUMERICAL = ("tests/learner", "tests/actors/test_local_engine.py", "tests/actors/test_engine_contract.py")


def numerical(arguments: Sequence[str]) -> list[str]:
    """pytest's arguments for the numerical tests among those that ``arguments`` name (all of them by default); [] when there are none."""
    named = [a for a in arguments if Path(ROOT, a.partition("::")[0]).exists()]
    options = [a for a in arguments if a not in named]
    chosen = [a for a in named if any(_inside(a, place) for place in NUMERICAL)]
    chosen += [place for place in NUMERICAL if not named or any(_inside(place, a) and place != a for a in named)]
    return ["-k", "not sglang", *options, *chosen] if chosen else []


def _inside(path: str, folder: str) -> bool:
    return Path(ROOT, path.partition("::")[0]).resolve().is_relative_to(Path(ROOT, folder.partition("::")[0]).resolve())


def main() -> int:
    """Run every check; arguments go to pytest."""
    arguments = sys.argv[1:]
    steps = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "pyright": ["pyright", "--pythonpath", sys.executable],
        "pytest": ["pytest", *arguments],
    }
    if plain := numerical(arguments):
        steps["pytest, plain kernels"] = ["pytest", *plain]
    failed = []
    for name, command in steps.items():
        print(f"== {name}", flush=True)
        begun, more = time.monotonic(), PLAIN_KERNELS if "plain" in name else {}
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False, env=os.environ | more).returncode:
            failed.append(name)
        print(f"   {name}: {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))
