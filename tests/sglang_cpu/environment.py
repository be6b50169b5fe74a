"""The virtual environment of the CPU server: sglang without its dependencies, and the few packages its imports need.

It is made anew only when the package lists in pyproject.toml change. COPPICE_SGLANG_VENV places it elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def python(table: dict[str, Any] | None = None) -> Path:
    """The interpreter of the environment, made first if need be; ``table`` replaces [tool.coppice.sglang_cpu]."""
    wanted = _table() if table is None else table
    venv, mark = folder(), _mark(wanted)
    stamp = venv / ".coppice"
    if not _holds(stamp, mark):
        venv.mkdir(parents=True, exist_ok=True)
        with open(venv / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs started at once install once
            if not _holds(stamp, mark):
                _install(venv, wanted)
                stamp.write_text(mark)
    return venv / "bin" / "python"


def folder() -> Path:
    """Where the environment is: beside the main one unless COPPICE_SGLANG_VENV says otherwise."""
    main = os.environ.get("COPPICE_VENV") or ROOT / ".venv"
    return Path(os.environ.get("COPPICE_SGLANG_VENV") or f"{main}-sglang").absolute()


def _table() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    table = project.get("tool", {}).get("coppice", {}).get("sglang_cpu")
    if table is None:
        raise LookupError("pyproject.toml has no table [tool.coppice.sglang_cpu], which lists the packages to install")
    return table


def _mark(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([table["no_deps"], table["packages"]]).encode()).hexdigest()


def _holds(stamp: Path, mark: str) -> bool:
    return stamp.is_file() and stamp.read_text() == mark


def _install(venv: Path, table: dict[str, Any]) -> None:
    print(f"setting up {venv} (some minutes the first time)", flush=True)
    if not (venv / "bin" / "pip").exists():  # made last, so a half-made environment is made whole
        _run([sys.executable, "-m", "venv", str(venv)], "making the virtual environment")
    (venv / ".gitignore").write_text("*\n")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run([*pip, *table["packages"]], "installing the packages that sglang imports")
    _run([*pip, "--no-deps", *table["no_deps"]], "installing sglang")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} failed (exit {done.returncode}): {(done.stdout + done.stderr)[-3000:]}")
