"""One run that is struck: it is launched, observed from outside, resumed when a fault has ended it,
and brought to its end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from coppice.common import shards
from coppice.common.process import die_with
from coppice.research.chaos import inside, plan
from coppice.research.chaos.forked import Fork
from coppice.scheduler.ledger.records import UPDATE
from coppice.scheduler.telemetry import health
from coppice.tools.launching import record

PATIENCE_S = 300.0
"""Seconds within which a run that was struck must have moved again: several starts of everything on
a busy machine."""
LOOK_S = 0.05


class Lost(AssertionError):
    """The run did what it may not: it ended, stood still, or said nothing of what ended it."""


class Run:
    """A run in ``folder`` of the world in ``world``. ``launch`` and ``resume`` launch it;
    ``settle`` waits until it moves and is whole."""

    def __init__(self, world: Path, folder: Path, schedulers: int = 1):
        self.world, self.folder = world, folder
        self.homes = [shards.folder(folder, number) for number in range(schedulers)]
        self.out = world / "launcher.out"
        self.launches = 0
        self.seen: dict[int, float] = {}
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._orders.bind(inside.address(os.getpid()))

    def launch(self, *arguments: str) -> None:
        """Start coppice launch with ``arguments``. It dies with this process."""
        self.launches += 1
        with self.out.open("ab") as out:
            self._said = out.tell()
            work = partial(inside.launch, self.world / "assets.json", arguments)
            self.launcher = Fork(work, out, dict(os.environ), partial(_alone, os.getpid()))

    def resume(self, *arguments: str) -> None:
        """Launch the run again, as its user would."""
        self.launch("--resume", str(self.folder), *arguments)

    def said(self) -> str:
        """What the launcher has said since its last launch."""
        with self.out.open("rb") as out:
            out.seek(self._said)
            return out.read().decode(errors="replace")

    # ------------------------------------------------------------------------------------------
    # what is seen

    def version(self) -> int:
        """The newest version that every scheduler has a record of."""
        return min(map(self._version, self.homes))

    def _version(self, home: Path) -> int:
        with contextlib.suppress(OSError), (home / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(ValueError):
                    values = json.loads(line)
                    if UPDATE in values:
                        return int(values["version"])
        return 0

    def pids(self) -> dict[str, int]:
        """The processes of this launch by name, the launcher among them."""
        launched = record.read(self.folder)
        members = (
            launched.members if launched is not None and launched.pid == self.launcher.pid else {}
        )
        pids = {name: member.pid for name, member in members.items()} | {
            "launcher": self.launcher.pid
        }
        for pid in set(pids.values()) - set(self.seen):
            with contextlib.suppress(psutil.Error):
                self.seen[pid] = psutil.Process(pid).create_time()
        return pids

    def whole(self) -> bool:
        """Whether every process lives and every worker has answered its scheduler since that
        started."""
        pids, reports = self.pids(), health.read_all(self.folder)
        if set(pids) != set(plan.places(plan.EVERYWHERE, len(self.homes))):
            return False
        if [report.pid for report in reports] != [pids[name] for name in self.schedulers]:
            return False
        here = [
            {worker.pid for worker in report.workers if worker.state == "here" and worker.answered}
            for report in reports
        ]
        workers = {pids[name] for name in plan.places(plan.WORKERS, len(self.homes))}
        return (
            set().union(*here) >= workers
            and all(pids["learner-0"] in one for one in here)
            and all(map(_runs, pids.values()))
        )

    @property
    def schedulers(self) -> list[str]:
        """The names of the schedulers."""
        return [shards.called("scheduler", number) for number in range(len(self.homes))]

    def wait(
        self, condition: Callable[[], bool], awaited: str, patience_s: float = PATIENCE_S
    ) -> float:
        """Wait until ``condition`` holds and return the seconds. Raises Lost when the launcher ends
        or the patience does."""
        start = time.monotonic()
        while not condition():
            if self.launcher.poll() is not None:
                raise Lost(
                    f"the run ended with status {self.launcher.poll()} before {awaited}:\n{self.said()[-1500:]}"
                )
            if time.monotonic() - start > patience_s:
                raise Lost(
                    f"{awaited} did not come within {patience_s:.0f} s:\n{self.said()[-1500:]}"
                )
            time.sleep(LOOK_S)
        return time.monotonic() - start

    def settle(self, updates: int) -> float:
        """Wait until so many more updates have been made by a whole run. Return the seconds."""
        mark = self.version() + updates
        return self.wait(lambda: self.version() >= mark and self.whole(), f"version {mark}")

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for the launcher's end and for that of its processes. Return its exit status."""
        try:
            status = self.launcher.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise Lost(
                f"the launcher did not end within {patience_s:.0f} s:\n{self.said()[-1500:]}"
            ) from None
        end = time.monotonic() + 60
        while left := self.alive():
            if time.monotonic() > end:
                raise Lost(f"processes outlive the launcher: {left}")
            time.sleep(LOOK_S)
        return status

    def moves_or_ends(self) -> int | None:
        """Wait until another update was made, or until the launcher has ended. Return its exit
        status, None if the run moves."""
        mark = self.version() + 1
        end = time.monotonic() + PATIENCE_S
        while self.version() < mark and self.launcher.poll() is None:
            if time.monotonic() > end:
                raise Lost(
                    f"the run neither moved nor ended within {PATIENCE_S:.0f} s:\n{self.said()[-1500:]}"
                )
            time.sleep(LOOK_S)
        return None if self.launcher.poll() is None else self.ended()

    def alive(self) -> list[int]:
        """The processes that this run ever had and that still live."""
        self.pids()
        return [pid for pid, born in self.seen.items() if _born(pid) == born]

    # ------------------------------------------------------------------------------------------
    # what is done

    def order(self, place: str, kind: str, variant: int, patience_s: float = 120.0) -> str:
        """Have a process strike itself, and return what it says about it. A process that was
        replaced before its moment came hands the order on. Raises Lost if no moment came."""
        message, ordered, end = (
            json.dumps({"kind": kind, "variant": variant}).encode(),
            0,
            time.monotonic() + patience_s,
        )
        self._orders.settimeout(LOOK_S)
        while time.monotonic() < end:
            try:
                if (pid := self.pids()[place]) != ordered:
                    self._orders.sendto(message, inside.address(pid))
                    ordered = pid
                return self._orders.recv(4096).decode()
            except OSError:  # no answer yet, or a process that does not listen yet
                time.sleep(LOOK_S)
        raise Lost(f"{kind} did not strike {place} within {patience_s:.0f} s")

    def signal(self, place: str, number: signal.Signals) -> None:
        """Send a process, or all schedulers, a signal."""
        pids = self.pids()
        for name in self.schedulers if place == plan.ALL else [place]:
            os.kill(pids[name], number)

    def kill_all(self) -> None:
        """Kill the launcher, with which the system kills all others, and wait for the end."""
        self.launcher.kill()
        self.ended()

    def finish(self) -> int:
        """Stop in order, as Ctrl-C does, then resume for three more updates. Return the exit status
        of the run's end."""
        self.launcher.send_signal(signal.SIGINT)
        if (status := self.ended()) != 130:
            raise Lost(
                f"Ctrl-C ended the run with status {status}, expected 130:\n{self.said()[-1500:]}"
            )
        self.resume("--set", f"scheduler.updates={self.version() + 3}")
        return self.ended()

    def close(self) -> None:
        """Kill what still runs."""
        self._orders.close()
        if self.launches:
            self.launcher.kill()
            self.launcher.wait()


def _alone(parent: int) -> None:
    """Give the launcher its own session, and have it killed with this process."""
    os.setsid()
    die_with(parent)


def _born(pid: int) -> float:
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return 0.0


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
