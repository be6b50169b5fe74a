"""What the launcher knows of a run, in ``RUN/launcher.json``: its processes, its restarts, what
failed and how it ended.

The launcher writes the file anew whenever something changes, and ``coppice launch --status`` reads
it.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from coppice.common.atomic import write_whole

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

    @property
    def alive(self) -> bool:
        """True if the launcher still runs."""
        with contextlib.suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.born) < 2.0
        return False


class Recorder:
    """Keeps the record of this launch, from its construction until ``end``. A full disk costs only
    the record."""

    def __init__(self, run: Path):
        before, born = read(run), psutil.Process().create_time()
        self._path = run / NAME
        self.record = Record(os.getpid(), born, failures=before.failures if before else [])
        self.write()

    def started(self, name: str, pid: int) -> None:
        """A process was started."""
        before = self.record.members.get(name)
        self.record.members[name] = Member(pid, time.time(), before.restarts + 1 if before else 0)
        self.write()

    def placed(self, name: str, pid: int, host: str) -> None:
        """A process that was asked of a cluster has started on a node."""
        before = self.record.members[name]
        if (before.pid, before.host) != (pid, host):
            self.record.members[name] = msgspec.structs.replace(before, pid=pid, host=host)
            self.write()

    def failed(self, process: str, cause: str, log: Path, then: str) -> None:
        """A process died."""
        self.record.failures = [
            *self.record.failures,
            Failure(time.time(), process, cause, str(log), then),
        ][-KEPT:]
        self.write()

    def stopping(self) -> None:
        """The launch was asked to end, and a second request would kill it."""
        self.record.stopping = True
        self.write()

    def end(self, state: Literal["finished", "stopped", "failed"], remedy: str = "") -> None:
        """The launch is over."""
        self.record.state, self.record.remedy = state, remedy
        self.write()

    def write(self) -> None:
        """Write the record."""
        with contextlib.suppress(OSError):
            write_whole(self._path, self.record)


def read(run: Path) -> Record | None:
    """Return the record of the newest launch of a run, or None if there is none that can be read."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
