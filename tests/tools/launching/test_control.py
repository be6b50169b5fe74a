"""Orders to a run: what they do to real processes and files, and when they are refused."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coppice.common.atomic import write_whole
from coppice.scheduler.telemetry import health
from coppice.tools.launching import control, record
from coppice.tools.launching.record import Member, Record

WAITS = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
    " print(flush=True); signal.pause()"
)


class Floor:
    """A run's folder with a launcher and a worker that are real processes."""

    def __init__(self, run: Path):
        self.run = run
        self.launcher = self.process("launcher")
        self.worker = self.process(f"{run}/processes/actor-0.json")
        self.record(stopping=False)

    def process(self, argument: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", WAITS, argument], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def record(self, stopping: bool) -> None:
        names = ("scheduler", "learner-0", "actor-0")
        members = {name: Member(self.worker.pid, time.time()) for name in names}
        members |= {"judges": Member(self.launcher.pid, 0.0), "actor-1": Member(0, 0.0)}
        pid = self.launcher.pid
        born = psutil.Process(pid).create_time()
        launch = Record(pid, born, members=members, stopping=stopping)
        write_whole(self.run / record.NAME, launch)


@pytest.fixture
def floor(tmp_path: Path) -> Iterator[Floor]:
    floor = Floor(tmp_path)
    yield floor
    for process in (floor.launcher, floor.worker):
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("scheduler", "scheduler cannot be drained, because nothing goes on without it"),
        ("mine", "mine was not started by coppice launch: end it where it was started"),
        ("actor-1", "actor-1 waits for a node with room"),
    ],
)
def test_what_the_run_needs_or_did_not_start_stays(floor: Floor, name: str, says: str) -> None:
    for order in (control.draining, control.drain):
        with pytest.raises(ValueError, match=says):
            order(floor.run, name)
    assert floor.worker.poll() is None


def test_stopping_asks_the_launcher_once_because_a_second_time_would_kill_it(floor: Floor) -> None:
    floor.record(stopping=True)
    with pytest.raises(ValueError, match="stopping already; a second request would kill it"):
        control.stop(floor.run)
    assert floor.launcher.poll() is None
    floor.record(stopping=False)
    assert "coppice launch --resume" in control.stop(floor.run)
    assert floor.launcher.wait(30) == 7


def test_a_run_that_does_not_run_here_takes_no_orders(floor: Floor) -> None:
    floor.launcher.kill()
    floor.launcher.wait()
    for order in (control.pause, control.stop, lambda run: control.drain(run, "actor-0")):
        with pytest.raises(ValueError, match="does not run on this machine"):
            order(floor.run)
    assert not (floor.run / health.PAUSED).exists()
    assert floor.worker.poll() is None
