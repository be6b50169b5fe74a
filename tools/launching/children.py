"""A process of a plan, on this machine or on a node of a cluster: its start, its log, its end and
the cause of its end."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from coppice.tools.launching import forks, watchdog
from coppice.tools.launching.failures import Cause, Rate, cause_of
from coppice.tools.launching.forks import ForkedProcess
from coppice.tools.launching.nodes import Away, Nodes
from coppice.tools.launching.preloaded import MODULES
from coppice.tools.launching.processes import PlannedProcess, complete, process_variables, spawn
from coppice.tools.launching.watchdog import SCHEDULER

SHARED_MEMORY = Path("/dev/shm")
_SEGMENT = re.compile(
    rf" ({SHARED_MEMORY}/(?:torch_\d+_|psm_|sem\.mp-|sglang_)[^/\s]+)$", re.MULTILINE
)
"""Names that these libraries choose. A user's own files there, such as a model's weights, are left
alone."""


def mapped_segments(pids: Iterable[int]) -> set[str]:
    """Return the segments that processes and their descendants map."""
    segments: set[str] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(OSError):
                    segments |= set(_SEGMENT.findall(Path(f"/proc/{member.pid}/maps").read_text()))
    return segments


def sweep_segments(segments: set[str]) -> None:
    """Remove those of ``segments`` that are still there although no process maps them."""
    left = {segment for segment in segments if Path(segment).exists()}
    for segment in left - mapped_segments(psutil.pids()) if left else ():
        with contextlib.suppress(OSError):
            Path(segment).unlink()


GRACE_S = 30.0
LEFT_S = 2 * GRACE_S
"""Seconds after which an exit with status 0 counts as a death, if the scheduler still runs (it
waits half as long for dismissed workers)."""
_TAIL_BYTES = 2**18
"""Bytes at the end of a log that are searched for the last traceback."""


class Child:
    """A process of the plan with its log and its restarts. verdict: why the launcher killed it, if
    it did."""

    process: subprocess.Popen[bytes] | ForkedProcess | Away

    def __init__(self, spec: PlannedProcess, run: Path, nodes: Nodes | None = None):
        self.spec, self.run, self.nodes = spec, run, nodes
        self.log = run / "logs" / f"{spec.name}.log"
        self.rate = Rate()
        self.start()

    def start(self) -> None:
        """Start the process, for the first time or again after a death."""
        spec = self.spec
        self.verdict: Cause | None = None
        self.again_at: float | None = None
        self.left_at = 0.0
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            if self.nodes is not None and self.nodes.takes(spec):
                self.process = self.nodes.start(spec, self.run, self.log)
                return
            inherited = {k: v for k, v in os.environ.items() if k not in spec.withheld}
            own = spec.environment | process_variables(spec.threads)
            file = str(self.run / "processes" / f"{spec.file}.json")
            show = spec.name.startswith(SCHEDULER)
            if forks.method != forks.SPAWN and spec.module in MODULES:
                own = complete(inherited, own)
                self.process = ForkedProcess(spec.module, file, own, self.log, show)
            else:
                command = [sys.executable, "-m", spec.module, file]
                out = subprocess.PIPE if show else log
                self.process = spawn(command, inherited, own, stdout=out, stderr=log)

    @property
    def here(self) -> int:
        """The process's number if it was started on this machine, otherwise 0."""
        return 0 if isinstance(self.process, Away) else self.process.pid

    def activity(self) -> tuple[str, str]:
        if isinstance(self.process, Away):
            return self.process.activity()
        return watchdog.activity(self.here, self.log)

    def dead(self, now: float) -> bool:
        """True if the process failed, or exited with status 0 more than ``LEFT_S`` seconds ago.
        now: seconds."""
        status = self.process.poll()
        if status == 0:
            self.left_at = self.left_at or now
            return now - self.left_at > LEFT_S
        return status is not None

    def cause(self) -> Cause:
        """Return why the process ended. Must be called after its end."""
        verdict = self.verdict or (self.process.verdict if isinstance(self.process, Away) else None)
        if verdict is not None:
            return verdict
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
            return cause_of(self.process.wait(), log.read().decode(errors="replace"))
