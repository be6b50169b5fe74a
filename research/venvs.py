"""Makes virtual environments beside the main one, each for a foreign program, from a table
[tool.coppice.TABLE] of pyproject.toml.

The table lists ``packages``, and in ``no_deps`` packages whose declared dependencies are not needed
here. An environment is made anew only when its table changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

from coppice.tools.bootstrap import ROOT


def python(name: str, table: str, over_ours: bool = False) -> Path:
    """Return the interpreter of the environment ``name``, which is made first if it is absent.

    over_ours: the environment sees every package of this one, so that both use the same versions
    and only other packages are installed. Raises CalledProcessError if a step fails.
    """
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coppice"][table]
    lists = [packages.get("no_deps", []), packages["packages"]]
    venv, mark = folder(name), hashlib.sha256(json.dumps(lists).encode()).hexdigest()
    stamp = venv / ".coppice"
    if not _holds(stamp, mark):
        venv.mkdir(parents=True, exist_ok=True)
        with open(venv / ".lock", "w") as lock:
            # of two commands that start together, only one installs
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _holds(stamp, mark):
                _install(venv, packages, over_ours)
                stamp.write_text(mark)
    return venv / "bin" / "python"


def folder(name: str) -> Path:
    """Return the environment's folder: beside the main one, unless COPPICE_<NAME>_VENV names
    another."""
    main = os.environ.get("COPPICE_VENV") or ROOT / ".venv"
    return Path(os.environ.get(f"COPPICE_{name.upper()}_VENV") or f"{main}-{name}").absolute()


def _holds(stamp: Path, mark: str) -> bool:
    return stamp.is_file() and stamp.read_text() == mark


def _install(venv: Path, table: dict[str, Any], over_ours: bool) -> None:
    print(f"setting up {venv} (a minute or more the first time)", file=sys.stderr, flush=True)
    inside = str(venv / "bin" / "python")
    # pip comes last, so an unfinished environment is made again
    if not (venv / "bin" / "pip").exists():
        _run(sys.executable, "-m", "venv", str(venv))
    (venv / ".gitignore").write_text("*\n")
    if over_ours:
        find = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        own = Path(_run(inside, "-c", find).strip())
        (own / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run(*pip, *table["packages"])
    if table.get("no_deps"):
        _run(*pip, "--no-deps", *table["no_deps"])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
