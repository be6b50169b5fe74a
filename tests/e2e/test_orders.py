"""A whole run of the real processes that is watched, paused, resumed, drained of a worker and
stopped by the keys of coppice watch."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health
from coppice.tools.inspecting.audit import audit
from coppice.tools.inspecting.watch import Table, Watch
from coppice.tools.launching import record
from tests.e2e.test_run import config, finish, gone, launch, wait_for_update

__all__ = ["config"]

SETTINGS = (
    "actors.count=2",
    "learner.count=1",
    "scheduler.updates=5000",
    "scheduler.dispatch.heartbeat_s=0.5",
)


async def test_the_keys_pause_resume_drain_and_stop_a_run(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(config, run, *(part for setting in SETTINGS for part in ("--set", setting)))
    await asyncio.to_thread(wait_for_update, run, process)

    def report() -> Health:
        assert process.poll() is None, process.communicate()[0]
        found = health.read(run)
        assert found is not None
        return found

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.05)

    app = Watch(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: app.usable["pause"])
        await pilot.press("p", "y")
        await until(lambda: report().paused and not report().growing)
        paused = report()
        await until(lambda: report().at > paused.at + 3)
        later = report()
        assert later.progress_at > paused.at, "a paused run counts as one that hangs"
        assert (later.done, later.growing) == (paused.done, 0)
        await until(lambda: app.usable["resume"])
        await pilot.press("r")
        await until(lambda: report().version > later.version + 1 and not report().paused)

        table = app.query_one("#processes", Table)
        await pilot.press("tab")
        while table.chosen() != "actor-1":
            await pilot.press("down")
        await pilot.press("d", "y")
        await until(
            lambda: any((w.name, w.state) == ("actor-1", "drained") for w in report().workers)
        )
        drained = report().version
        await until(lambda: report().version > drained + 1)

        await pilot.press("s", "y")
        await until(lambda: process.poll() is not None)
    out = finish(process)
    assert process.returncode == 130, out
    assert "paused: no new tree begins; trees in flight finish" in out
    assert "resumed" in out
    gone(run)
    launched = record.read(run)
    assert launched is not None
    assert (launched.state, launched.stopping, launched.failures, launched.resumes) == (
        "stopped",
        True,
        [],
        0,
    )
    assert audit(run) == []
