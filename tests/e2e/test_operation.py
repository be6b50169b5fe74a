"""Whole runs that are watched, paused, drained, stopped, or meet a process that hangs."""

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health
from coppice.tools.inspecting.audit import audit
from coppice.tools.inspecting.watch import ProcessTable, WatchApp
from coppice.tools.launching import record
from coppice.tools.launching.status import Status, gather
from tests.runs import Launch, Run

ENDLESS = "scheduler.updates=5000 scheduler.dispatch.heartbeat_s=0.5"
QUICK = "scheduler.dispatch.dead_after_s=3 scheduler.dispatch.replace_after_s=6"


def report(run: Run) -> Health:
    assert run.launcher.poll() is None, run.said()
    said = health.read(run.folder)
    assert said is not None
    return said


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_judge_in_an_endless_loop_is_replaced_and_a_killed_launcher_leaves_nothing(
    searching: Path, tmp_path: Path, launch: Launch
) -> None:
    hanging = f"'tests.e2e.hanging:Hanging'={{gate='{tmp_path}/gate'}}"
    run = launch(searching, f"{ENDLESS} {QUICK} judges.use={{{hanging},slate_rules={{}}}}")

    def status() -> Status:
        return gather(run.folder, time.monotonic())

    run.wait(lambda: any(p.name == "judges" and p.restarts for p in status().processes), "a judge")
    run.moved()
    living = {p.name for p in status().processes if p.state in ("running", "sleeping")}
    assert living == {"scheduler", "judges", "retriever", "actor-0", "learner-0"}
    line, *_ = [line for line in run.said().splitlines() if line.startswith("judges: ")]
    assert line.startswith("judges: has been silent for ")
    assert "its last calls: judge.ex" in line
    assert "in never_ends" in (run.folder / "logs" / "judges.log").read_text()
    launched = record.read(run.folder)
    assert launched is not None
    assert [failure.process for failure in launched.failures] == ["judges"]
    assert launched.members["judges"].restarts == 1
    pids = {member.pid for member in launched.members.values()}
    connections = psutil.net_connections("tcp")
    listening = [c for c in connections if c.pid in pids and c.status == "LISTEN"]
    ports = [c.laddr.port for c in listening]  # pyright: ignore[reportAttributeAccessIssue]
    assert ports
    run.kill_all()
    end = time.monotonic() + 60
    while left := [*filter(listens, ports), *run.left(pids)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert (status().state, status().do) == ("killed", f"coppice launch --resume {run.folder}")


async def test_the_keys_pause_resume_drain_and_stop_a_run(searching: Path, launch: Launch) -> None:
    run = launch(searching, f"{ENDLESS} actors.count=2")
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
        await until(lambda: report(run).at > paused.at + 1.5)
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
    run.finish(130)
    launched = record.read(run.folder)
    assert launched is not None
    assert (launched.state, launched.stopping) == ("stopped", True)
    assert (launched.failures, launched.resumes) == ([], 0)
    assert audit(run.folder) == []
