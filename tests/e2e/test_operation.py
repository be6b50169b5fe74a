"""Whole runs that are watched, paused, drained and stopped, that meet a process that hangs, that
send their records to trackers, and what a killed launcher leaves behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health
from coppice.tools.inspecting.audit import audit
from coppice.tools.inspecting.watch import ProcessTable, WatchApp
from coppice.tools.launching import record
from coppice.tools.launching.status import Status, gather
from tests.runs import Run
from tests.scheduler.test_tracking import in_trackio, in_wandb
from tests.world import UPDATES

QUICK = (
    "scheduler.dispatch.heartbeat_s=0.5",
    "scheduler.dispatch.dead_after_s=5",
    "scheduler.dispatch.replace_after_s=10",
)
ENDLESS = "scheduler.updates=5000"


def report(run: Run) -> Health:
    """What the scheduler says of a run that lives."""
    assert run.launcher.poll() is None, run.said()
    said = health.read(run.folder)
    assert said is not None
    return said


def test_a_judge_in_an_endless_loop_is_diagnosed_and_replaced_and_the_run_ends_well(
    searching: Path, tmp_path: Path, launch: Callable[..., Run]
) -> None:
    hanging = f"'tests.e2e.hanging:Hanging' = {{ gate = '{tmp_path}/gate' }}"
    use = f"judges.use={{ {hanging}, slate_rules = {{}} }}"
    run = launch(searching, *QUICK, use, "scheduler.updates=2")
    out = run.finish()
    line, *_ = [line for line in out.splitlines() if line.startswith("judges: ")]
    assert line.startswith("judges: has been silent for ")
    assert "it computes (state R); its threads are in e2e/hanging.py:" in line
    assert " never_ends (stacks in its log); its last calls: judge.exact_match for tree " in line
    assert "starting it again in 1 s" in line
    assert "in never_ends" in (run.folder / "logs" / "judges.log").read_text()
    assert gather(run.folder, time.monotonic()).state == "finished"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_stopped_judge_is_replaced_and_a_killed_launcher_leaves_no_process_port_or_shared_memory(
    searching: Path, launch: Callable[..., Run]
) -> None:
    run = launch(searching, *QUICK, ENDLESS)
    run.moved()

    def status() -> Status:
        return gather(run.folder, time.monotonic())

    first = {p.name: p for p in status().processes}
    assert {p.state for p in first.values()} <= {"running", "sleeping", "disk-sleep"}
    assert set(first) == {"scheduler", "judges", "retriever", "actor-0", "learner-0"}
    os.kill(first["judges"].pid, signal.SIGSTOP)
    run.wait(lambda: "judges hangs; the launcher will replace it" in status().do, "the diagnosis")
    run.wait(lambda: any(p.name == "judges" and p.restarts for p in status().processes), "a judge")
    run.moved()
    launched = record.read(run.folder)
    assert launched is not None
    failure = next(failure for failure in launched.failures if failure.process == "judges")
    assert "it is stopped (state T)" in failure.cause
    pids = {member.pid for member in launched.members.values()}
    connections = psutil.net_connections("tcp")
    listening = [c for c in connections if c.pid in pids and c.status == "LISTEN"]
    ports = [c.laddr.port for c in listening]  # pyright: ignore[reportAttributeAccessIssue]
    assert ports
    run.kill_all()
    # a killed process may still be ending, and torch's own manager unlinks its segments some
    # seconds after their owner was killed
    end = time.monotonic() + 60
    while taken := [port for port in ports if listens(port)]:
        assert time.monotonic() < end, taken
        time.sleep(0.1)
    while left := [f for f in os.listdir("/dev/shm") if any(f"_{pid}_" in f for pid in pids)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert (status().state, status().do) == ("killed", f"coppice launch --resume {run.folder}")


async def test_the_keys_pause_resume_drain_and_stop_a_run(
    searching: Path, launch: Callable[..., Run]
) -> None:
    run = launch(searching, "actors.count=2", ENDLESS, "scheduler.dispatch.heartbeat_s=0.5")
    await asyncio.to_thread(run.moved)

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.05)

    app = WatchApp(run.folder)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: app.usable["pause"])
        await pilot.press("p", "y")
        await until(lambda: report(run).paused and not report(run).growing)
        paused = report(run)
        await until(lambda: report(run).at > paused.at + 3)
        later = report(run)
        assert later.progress_at > paused.at, "a paused run counts as one that hangs"
        assert (later.done, later.growing) == (paused.done, 0)
        await until(lambda: app.usable["resume"])
        await pilot.press("r")
        await until(lambda: report(run).version > later.version + 1 and not report(run).paused)

        table = app.query_one(ProcessTable)
        while table.chosen() != "actor-1":
            await pilot.press("down")
        await pilot.press("d", "y")
        drained = ("actor-1", "drained")
        await until(lambda: drained in {(w.name, w.state) for w in report(run).workers})
        version = report(run).version
        await until(lambda: report(run).version > version + 1)

        await pilot.press("s", "y")
        await until(lambda: run.launcher.poll() is not None)
    out = run.finish(130)
    assert "paused: no new tree begins; trees in flight finish" in out
    assert "resumed" in out
    launched = record.read(run.folder)
    assert launched is not None
    assert (launched.state, launched.stopping) == ("stopped", True)
    assert (launched.failures, launched.resumes) == ([], 0)
    assert audit(run.folder) == []


def test_a_killed_run_goes_on_in_its_trackers_and_its_records_come_out_as_json(
    searching: Path, tmp_path: Path, launch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both trackers are offline; Prometheus has an endpoint."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_API_KEY", "planted-6f1c0b7e4d2a")
    flags = ["--track", "wandb", "--track", "trackio"]
    run = launch(searching, "scheduler.prometheus=127.0.0.1:0", *flags)
    run.moved()
    url = (run.folder / "prometheus").read_text()
    scraped = urllib.request.urlopen(url, timeout=60).read().decode()
    assert 'coppice_learner_groups{run="run"}' in scraped
    # its workers may have come since the last heartbeat
    assert f'coppice_health_updates{{run="run"}} {UPDATES}.0' in scraped
    run.kill_all()
    run.resume("--json")
    out = run.finish()
    run.check()
    assert set((run.folder / "metrics.jsonl").read_text().splitlines()) & set(out.splitlines())
    updates = [record for record in run.records() if "learner/groups" in record]
    losses = {record["version"]: record["learner/surrogate"] for record in updates}
    # as the terminal says of a tracker that a busy machine has not let finish
    for name in ("wandb", "trackio"):
        again = [
            sys.executable,
            "-m",
            "coppice.scheduler.telemetry.tracking",
            name,
            str(run.folder),
        ]
        subprocess.run(again, stdin=subprocess.DEVNULL, check=True)
    for points in (in_trackio(run.folder), in_wandb(run.folder)):
        tracked = [(step, loss) for step, loss in points if loss is not None]
        assert max(Counter(step for step, _ in tracked).values()) == 1, "no update twice"
        assert tracked[-1][0] == UPDATES
        # a record that was on its way at the kill may be missing
        assert dict(tracked).items() <= losses.items()
    for log in ("wandb", "trackio", "scheduler"):
        assert "planted-6f1c0b7e4d2a" not in (run.folder / "logs" / f"{log}.log").read_text()
