"""The command tools/test: ruff, pyright, pytest; all run, the first failure decides the exit status."""

import subprocess
import sys

from tools.bootstrap import ROOT


def main() -> int:
    """Run every check; arguments go to pytest."""
    steps = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "pyright": ["pyright", "--pythonpath", sys.executable],
        "pytest": ["pytest", *sys.argv[1:]],
    }
    failed = []
    for name, command in steps.items():
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))
