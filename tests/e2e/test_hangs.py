"""Whole runs of the real processes that meet one that hangs, and what a killed launcher leaves
behind."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coppice.scheduler.telemetry.health import read
from coppice.tools.launching import record
from coppice.tools.launching.status import Status, gather
from tests.e2e.test_run import config, finish, gone, launch, wait_for_update

__all__ = ["config"]

SMALL = ["actors.count=1", "learner.count=1"]
QUICK = [
    "scheduler.dispatch.heartbeat_s=0.5",
    "scheduler.dispatch.dead_after_s=5",
    "scheduler.dispatch.replace_after_s=10",
]


def settings(*assignments: str) -> list[str]:
    return [part for assignment in assignments for part in ("--set", assignment)]


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for it."""
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_a_judge_in_an_endless_loop_is_diagnosed_and_replaced_and_the_run_ends_well(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    use = f"judges.use={{ 'tests.e2e.hanging:Hanging' = {{ gate = '{tmp_path}/gate' }}, slate_rules = {{}} }}"
    process = launch(config, run, *settings(*SMALL, *QUICK, use, "scheduler.updates=2"))
    out = finish(process)
    assert process.returncode == 0, out
    line, *_ = [line for line in out.splitlines() if line.startswith("judges: ")]
    assert line.startswith("judges: has been silent for ")
    assert "it computes (state R); its threads are in e2e/hanging.py:" in line
    assert " never_ends (stacks in its log); its last calls: judge.exact_match for tree " in line
    assert "starting it again in 1 s" in line
    assert "in never_ends" in (run / "logs" / "judges.log").read_text()
    assert gather(run, time.monotonic()).state == "finished"


def test_a_stopped_judge_is_replaced_and_a_killed_launcher_leaves_no_process_port_or_shared_memory(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = launch(config, run, *settings(*SMALL, *QUICK, "scheduler.updates=5000"))
    wait_for_update(run, process)

    def status() -> Status:
        return gather(run, time.monotonic())

    first = {p.name: p for p in status().processes}
    assert {p.state for p in first.values()} <= {"running", "sleeping", "disk-sleep"}
    assert set(first) == {"scheduler", "judges", "retriever", "actor-0", "learner-0"}
    os.kill(first["judges"].pid, signal.SIGSTOP)
    until(lambda: "judges hangs; the launcher will replace it" in status().do, process)
    until(lambda: any(p.name == "judges" and p.restarts for p in status().processes), process)
    updates = (read(run) or pytest.fail("no report")).version
    until(lambda: (read(run) or pytest.fail("no report")).version > updates, process)
    launched = record.read(run) or pytest.fail("no record")
    failure = next(failure for failure in launched.failures if failure.process == "judges")
    assert "it is stopped (state T)" in failure.cause
    pids = {member.pid for member in launched.members.values()}
    ports = [
        c.laddr.port
        for c in psutil.net_connections("tcp")
        if c.pid in pids and c.status == "LISTEN"
    ]  # pyright: ignore[reportAttributeAccessIssue]
    assert ports
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone(run)
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    # torch's own manager unlinks its segments some seconds after their owner was killed
    end = time.monotonic() + 60
    while left := [
        name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)
    ]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert (status().state, status().do) == ("killed", f"coppice launch --resume {run}")
