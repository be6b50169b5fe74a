"""What the launcher writes into a run folder of itself (``launcher.json``: processes, restarts,
failures and the end) and of the machine (``environment.json``), and how it names a run."""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import time
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from coppice.common.atomic import write_whole
from coppice.common.hardware import PROCESSOR, cores, said, visible_gpus
from coppice.common.jsonl import readable
from coppice.tools.bootstrap import ROOT

_FULL_BYTES = 2**24
"""A disk with less free space counts as full: no weights of a version fit, nor minutes of logs."""


def existing(path: Path) -> Path:
    """Return ``path`` if it exists, or its nearest parent that exists (which may be a file where a
    folder is needed)."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def no_space(run: Path) -> str:
    """Return the message for a full disk of the run, with the remedy."""
    again = resume_command(run) if (run / "config.json").is_file() else "start again"
    free = shutil.disk_usage(existing(run)).free / 1e6
    return (
        f"{shown(run)}'s disk has {free:.1f} MB free:"
        f" the processes cannot write; free some, then {again}"
    )


def full(run: Path) -> bool:
    """True if the disk of a run has hardly any free space."""
    return shutil.disk_usage(existing(run)).free < _FULL_BYTES


def shown(path: Path) -> Path:
    """Return ``path`` relative to the current folder where possible."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def resume_command(run: Path) -> str:
    """Return the command that goes on with a run, as a shell takes it."""
    return f"coppice launch --resume {shlex.quote(str(shown(run)))}"


NAME = "launcher.json"
KEPT = 50
"""The number of failures that are remembered."""


class Failure(msgspec.Struct, frozen=True):
    """The death of a process. time: seconds of the epoch. then: what the launcher did."""

    time: float
    process: str
    cause: str
    log: str
    then: str


class Member(msgspec.Struct, frozen=True):
    """A process of the run. began: seconds of the epoch. restarts: by this launch, whole resumes of
    the run included. host: the node on which it runs, "" for this machine; there its number is 0
    until the cluster has room for it."""

    pid: int
    began: float
    restarts: int = 0
    host: str = ""


class Record(msgspec.Struct):
    """One launch. born: when the launcher's process began, which tells it from a later process with
    its number. stopping: it was asked to end."""

    pid: int
    born: float
    state: Literal["running", "finished", "stopped", "failed"] = "running"
    members: dict[str, Member] = {}
    failures: list[Failure] = []
    resumes: int = 0
    remedy: str = ""
    stopping: bool = False
    host: str = ""
    boot: float = 0.0
    """When the machine began. Whoever sets the clock moves this and the beginnings of processes."""

    @property
    def elsewhere(self) -> bool:
        """Whether another machine must tell if it still runs."""
        return self.state == "running" and self.host not in ("", socket.gethostname())

    @property
    def alive(self) -> bool:
        with contextlib.suppress(psutil.Error):
            moved = psutil.boot_time() - self.boot if self.boot else 0.0
            began = psutil.Process(self.pid).create_time() - moved
            return not self.elsewhere and abs(began - self.born) < 2.0
        return False


class Recorder:
    """Keeps the record of this launch, from its construction until ``end``. A full disk costs only
    the record."""

    def __init__(self, run: Path):
        before, born = read(run), psutil.Process().create_time()
        self._path = run / NAME
        failures = before.failures if before else []
        where = {"host": socket.gethostname(), "boot": psutil.boot_time()}
        self.record = Record(os.getpid(), born, failures=failures, **where)
        self.write()

    def started(self, name: str, pid: int) -> None:
        before = self.record.members.get(name)
        self.record.members[name] = Member(pid, time.time(), before.restarts + 1 if before else 0)
        self.write()

    def placed(self, name: str, pid: int, host: str) -> None:
        """A process that was asked of a cluster has started on a node."""
        before = self.record.members[name]
        if (now := msgspec.structs.replace(before, pid=pid, host=host)) != before:
            self.record.members[name] = now
            self.write()

    def failed(self, process: str, cause: str, log: Path, then: str) -> None:
        failure = Failure(time.time(), process, cause, str(log), then)
        self.record.failures = [*self.record.failures, failure][-KEPT:]
        self.write()

    def stopping(self) -> None:
        """The launch was asked to end, and a second request would kill it."""
        self.record.stopping = True
        self.write()

    def end(self, state: Literal["finished", "stopped", "failed"], remedy: str = "") -> None:
        self.record.state, self.record.remedy = state, remedy
        self.write()

    def write(self) -> None:
        with contextlib.suppress(OSError):
            write_whole(self._path, self.record)


def read(run: Path) -> Record | None:
    """Return the record of a run's newest launch, or None if there is none that can be read."""
    return readable(run / NAME, Record)


ENVIRONMENT = "environment.json"


def write_environment(run: Path) -> None:
    """Write ``environment`` into a run's folder. Former ones stay as environment-1.json, ... Raises
    OSError."""
    if (before := run / ENVIRONMENT).exists():
        before.rename(run / f"environment-{len([*run.glob('environment-*.json')]) + 1}.json")
    write_whole(before, environment())


def environment() -> dict[str, object]:
    """Return what computes a run: commit (with "-dirty" if files were changed; "" if there is no
    checkout), machine, the cores that this process may use, GPUs as "name, driver version", and the
    versions of packages."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    smi = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
    git = "describe --always --dirty --abbrev=40 --exclude=*".split()
    packages = {d.name: d.version for d in importlib.metadata.distributions() if d.name}
    return {
        "commit": said("git", "-C", str(ROOT), *git).strip() if (ROOT / ".git").exists() else "",
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": said(*smi.split()).splitlines() if visible_gpus() else [],
        "packages": dict(sorted(packages.items())),
    }
