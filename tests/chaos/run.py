"""One run that is struck, and how its processes are told to strike themselves."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil

from coppice.common import shards
from coppice.scheduler.telemetry import health
from tests.chaos import inside, plan
from tests.forks import Server
from tests.runs import Lost, Run

PATIENCE_S, LOOK_S = 300.0, 0.05
"""Seconds within which a run that was struck must have moved again (several starts of everything on
a busy machine), and between two looks."""


class Struck(Run):
    """A run whose processes take orders. ``settle`` waits until it moves and is whole."""

    def __init__(self, config: Path, folder: Path, server: Server, schedulers: int = 1):
        super().__init__(config, folder, server, schedulers, "tests.chaos.inside:begin")
        # the disk of the run's folder may be full
        self.out = config.with_name("launcher.out")
        self.seen: set[int] = set()
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._orders.bind(inside.address(os.getpid()))

    def pids(self) -> dict[str, int]:
        pids = super().pids()
        self.seen |= set(pids.values())
        return pids

    def whole(self) -> bool:
        pids, reports = self.pids(), health.read_all(self.folder)
        if set(pids) != set(plan.places(plan.EVERYWHERE, len(self.homes))):
            return False
        if [report.pid for report in reports] != [pids[name] for name in self.schedulers]:
            return False
        here = [{w.pid for w in r.workers if w.state == "here" and w.answered} for r in reports]
        workers = {pids[name] for name in plan.places(plan.WORKERS, len(self.homes))}
        led = all(pids["learner-0"] in one for one in here)
        return set().union(*here) >= workers and led and all(map(_runs, pids.values()))

    @property
    def schedulers(self) -> list[str]:
        return [shards.called("scheduler", number) for number in range(len(self.homes))]

    def settle(self, updates: int) -> None:
        mark = self.version() + updates
        self.wait(lambda: self.version() >= mark and self.whole(), f"version {mark}", PATIENCE_S)

    def moves_or_ends(self) -> int | None:
        try:
            self.moved()
        except Lost:
            if self.launcher.poll() is None:
                raise
        return None if self.launcher.poll() is None else self.ended()

    def order(self, place: str, kind: str, variant: int, patience_s: float = 120.0) -> str:
        """Return what a process says that strikes itself. One that was replaced before its moment
        came hands the order on. Raises Lost if no moment came."""
        message = json.dumps({"kind": kind, "variant": variant}).encode()
        ordered, end = 0, time.monotonic() + patience_s
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

    def signal(self, name: str, number: signal.Signals) -> None:
        for each in self.schedulers if name == plan.ALL else [name]:
            super().signal(each, number)

    def stop_and_end(self) -> int:
        self.launcher.send_signal(signal.SIGINT)
        self.finish(130)
        self.resume(f"scheduler.updates={self.version() + 3}")
        return self.ended()

    def close(self) -> None:
        self._orders.close()
        super().close()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
