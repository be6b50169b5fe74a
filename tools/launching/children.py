"""A process of a plan, on this machine or on a node of a cluster: its start, its log, its end and
the cause of its end."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from coppice.common.process import die_with
from coppice.tools.bootstrap import ROOT
from coppice.tools.launching import watchdog
from coppice.tools.launching.failures import Cause, Rate, cause_of
from coppice.tools.launching.nodes import Away, Nodes
from coppice.tools.launching.processes import Process
from coppice.tools.launching.watchdog import SCHEDULER

GRACE_S = 30.0
LEFT_S = 2 * GRACE_S
"""Seconds after which an exit with status 0 counts as a death, if the scheduler still runs (it
waits half as long for dismissed workers)."""
_TAIL_BYTES = 2**18
"""Bytes at the end of a log that are searched for the last traceback."""


def _alone(launcher: int) -> None:
    """Give the child, in which this runs, its own session, so that Ctrl-C reaches only the
    launcher; have it killed with the launcher."""
    os.setsid()
    die_with(launcher)


class Child:
    """A process of the plan with its log and its restarts. The process starts with the object;
    ``start`` starts it again after a death.

    verdict: why the launcher killed it, if it did."""

    def __init__(self, spec: Process, run: Path, nodes: Nodes | None = None):
        self.spec, self.run, self.nodes = spec, run, nodes
        self.log = run / "logs" / f"{spec.name}.log"
        self.rate = Rate()
        self.again_at: float | None = None
        self.left_at = 0.0
        self.verdict: Cause | None = None
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes] | Away:
        """Start the process, for the first time or again."""
        self.verdict = None
        if self.nodes is not None and self.nodes.takes(self.spec):
            self.log.touch()
            self._log_start = self.log.stat().st_size
            return self.nodes.start(self.spec, self.run, self.log)
        inherited = {
            name: value for name, value in os.environ.items() if name not in self.spec.withheld
        }
        environment = inherited | self.spec.environment
        threads = str(self.spec.threads)
        environment |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }
        paths = [path for path in (self.spec.environment.get("PYTHONPATH"), str(ROOT)) if path]
        environment |= {"PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        process_file = str(self.run / "processes" / f"{self.spec.file}.json")
        command = [self.spec.python or sys.executable, "-m", self.spec.module, process_file]
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            show = subprocess.PIPE if self.spec.name.startswith(SCHEDULER) else log
            return subprocess.Popen(
                command,
                stdout=show,
                stderr=log,
                env=environment,
                preexec_fn=partial(_alone, os.getpid()),
            )

    @property
    def here(self) -> int:
        """The process's number if it was started on this machine, otherwise 0."""
        return 0 if isinstance(self.process, Away) else self.process.pid

    def asked(self) -> tuple[str, str]:
        """Return what the process does, and its stacks (watchdog.asked), wherever it runs."""
        return (
            self.process.asked()
            if isinstance(self.process, Away)
            else watchdog.asked(self.here, self.log)
        )

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
