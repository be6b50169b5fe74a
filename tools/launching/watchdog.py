"""Finds processes that are alive and do not answer, by ``RUN/health.json`` and the system's list of
stopped processes. A process that is merely slow is never found:
heartbeats stop only if the event loop of a worker stands still."""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from coppice.common.process import STACKS
from coppice.scheduler.dispatch.calls import DispatchConfig
from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health

HELD_UP_S = 10.0
"""The launcher looks several times a second. If so much time passed between two looks, the whole
machine or container was held up, and the other processes get ``replace_after_s`` anew."""
SCHEDULER = "scheduler"
_STATES = {
    psutil.STATUS_STOPPED: "it is stopped (state T), as by SIGSTOP",
    psutil.STATUS_DISK_SLEEP: "it waits for a disk or a device (state D)",
    psutil.STATUS_RUNNING: "it computes (state R)",
    psutil.STATUS_SLEEPING: "it waits (state S)",
}
QUIET_S = 0.5


class Finding(msgspec.Struct, frozen=True):
    """A process that is stuck. why: a clause without its subject. calls: its last calls. whole: the
    run itself stalls."""

    process: str
    why: str
    calls: list[str] = []
    whole: bool = False


class Watchdog:
    """Looks at the processes of one start of a run. ``look`` is called several times a second. run:
    the folder of a scheduler; scheduler: its name."""

    def __init__(self, run: Path, scheduler: str = SCHEDULER):
        self.run, self.scheduler = run, scheduler
        self.health: Health | None = None
        self._stopped: dict[int, float] = {}
        self._looked = self._calm_since = time.monotonic()
        self._replaced = -1.0

    def look(
        self, pids: Mapping[str, int], now: float, away: Mapping[tuple[str, int], str] = {}
    ) -> Finding | None:
        """Return a stuck process. pids: the living processes of this machine, by name. away: the
        names of those of other nodes, by host and number. now: monotonic seconds."""
        if now - self._looked > HELD_UP_S:
            self._calm_since = now
            self._stopped.clear()
        self._looked = now
        report = health.read(self.run)
        self.health = report if report and report.pid == pids.get(self.scheduler) else None
        limit = report.replace_after_s if report is not None else DispatchConfig().replace_after_s
        stopped = self._stopped_process(pids, now, limit)
        if stopped is not None or self.health is None or now - self._calm_since < limit:
            return stopped
        if self.health.phase == "stopping":
            return None  # workers leave, and the learner writes its last checkpoint
        names = {(self.health.host, pid): name for name, pid in pids.items()} | dict(away)
        return self._silent(self.health, names, now) or self._stalled(self.health, names)

    def _stopped_process(self, pids: Mapping[str, int], now: float, limit: float) -> Finding | None:
        stopped = {pid: name for name, pid in pids.items() if _status(pid) == psutil.STATUS_STOPPED}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped}
        for pid, since in self._stopped.items():
            if now - since > limit:
                why = f"has been stopped for {now - since:.0f} s"
                workers = self.health.workers if self.health is not None else []
                calls = next((worker.calls for worker in workers if worker.pid == pid), [])
                return Finding(stopped[pid], why, calls)
        return None

    def _silent(
        self, report: Health, names: Mapping[tuple[str, int], str], now: float
    ) -> Finding | None:
        limit = report.replace_after_s
        if now - report.at > limit:
            return Finding(self.scheduler, f"has not reported for {now - report.at:.0f} s")
        for worker in report.workers:
            name = names.get((worker.host, worker.pid))
            if name is None:
                continue  # of coppice serve, or dead already, or started again
            if now - worker.heard > limit:
                why = f"has been silent for {now - worker.heard:.0f} s"
                if worker.state != "here" and not worker.state.startswith("silent"):
                    why = f"left {now - worker.heard:.0f} s ago ({worker.state}) and has not ended"
                return Finding(name, why, worker.calls)
            if (n := worker.unanswered) >= health.UNANSWERED:
                why = f"answers heartbeats and let {n} calls in a row pass their deadline"
                return Finding(name, why, worker.calls)
            if worker.stalled >= health.UNANSWERED:
                why = "answers heartbeats and let many of its calls stall, again and again"
                return Finding(name, why, worker.calls)
        return None

    def _stalled(self, report: Health, names: Mapping[tuple[str, int], str]) -> Finding | None:
        """After ``stall_s`` a worker that holds up the run is replaced; after as long again, or if
        it is vital, the whole run is resumed."""
        idle = report.at - report.progress_at
        if idle <= report.stall_s:
            return None
        waits = "; ".join(report.waits()) or "no call is open"
        why = f"holds up the run: no node, group or update for {idle:.0f} s ({report.phase})"
        why = f"{why}. What waits: {waits}"
        stuck = next((worker for worker in report.workers if worker.name == report.stuck), None)
        culprit = names.get((stuck.host, stuck.pid)) if stuck is not None else None
        if self._replaced == report.progress_at:  # a worker was replaced, and that did not help
            return Finding(self.scheduler, why, whole=True) if idle > 2 * report.stall_s else None
        if stuck is None or culprit is None or culprit.startswith((SCHEDULER, "learner")):
            return Finding(culprit or self.scheduler, why, whole=True)
        self._replaced = report.progress_at
        return Finding(culprit, why, stuck.calls)


def _status(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status()
    return ""


def _answers(pid: int) -> bool:
    """True if the process would write its stacks on ``STACKS``, which ends a process that has not
    begun (common/process.py)."""
    with contextlib.suppress(OSError):
        caught = re.search(r"\nSigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (STACKS - 1) & 1)
    return False


def stacks(pid: int, log: Path, wait_s: float = 5.0) -> str:
    """Have a process write its Python stacks to its log, and return them; "" if it cannot answer.

    The stacks of a process that is not given the processor come in pieces, so they count as whole
    after ``QUIET_S`` without a further piece.
    """
    if _status(pid) == psutil.STATUS_STOPPED or not _answers(pid):
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS)
        text, now = b"", time.monotonic()
        end, quiet_since = now + wait_s, now
        while now < end and not (text and now - quiet_since > QUIET_S):
            time.sleep(0.1)
            more, now = file.read(), time.monotonic()
            text, quiet_since = text + more, now if more else quiet_since
    return text.decode(errors="replace")


def activity(pid: int, log: Path) -> tuple[str, str]:
    """Return what a process of this machine does, as far as the system knows, and its stacks, which
    it also writes to its log; "" for what it cannot say."""
    status = _status(pid)
    doing = _STATES.get(status, f"its state is {status}" if status else "it is gone")
    return doing, stacks(pid, log)


def diagnosis(finding: Finding, doing: str, stacks: str) -> str:
    """Return what is known of a stuck process, as one line. doing, stacks: its ``activity``."""
    calls = "; ".join(finding.calls)
    logged = "its stacks are in its log" if stacks else ""
    parts = [finding.why, doing, logged, f"its last calls: {calls}" if calls else ""]
    return "; ".join(filter(None, parts))
