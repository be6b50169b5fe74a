"""Records with what a run is computed, in ``RUN/environment.json``: machine, Python, packages and
the commit of this code. A resumed run's record is that of its newest launch."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import msgspec
import psutil

from coppice.common.atomic import write_whole
from coppice.common.hardware import PROCESSOR, visible_gpus
from coppice.tools.bootstrap import ROOT

NAME = "environment.json"


class Environment(msgspec.Struct, frozen=True):
    """What computes a run. cores: those that this process may use. commit: of a git checkout, with
    "-dirty" if files were changed, or "". gpus: "name, driver version" each. packages: version by
    name."""

    commit: str
    python: str
    system: str
    processor: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    packages: dict[str, str]


def write(run: Path) -> None:
    """Write the record of this machine into the run folder. Raises OSError."""
    write_whole(run / NAME, here())


def here() -> Environment:
    """Return the environment of this process."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = (
        _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        if visible_gpus()
        else ""
    )
    describe = (
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    )
    return Environment(
        commit=_said(*describe) if (ROOT / ".git").exists() else "",
        python=platform.python_version(),
        system=platform.platform(),
        processor=models[0] if models else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus.splitlines(),
        packages=dict(
            sorted((d.name, d.version) for d in importlib.metadata.distributions() if d.name)
        ),
    )


def _said(*command: str) -> str:
    """Return what a command prints, or "" if it is not there, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
