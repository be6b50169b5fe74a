"""coppice watch: what it shows at every size and of broken runs, and what its keys do."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from textual.pilot import Pilot

from coppice.common.atomic import write_whole
from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health, Queue, WorkerHealth
from coppice.tools.inspecting.watch import WatchApp, main
from coppice.tools.launching import control, record
from coppice.tools.launching.record import Failure, Member, Record
from tests import run_folder
from tests.tools.said import Patch, Said

NOBODY = 2**22 + 1
"""A number that no process has."""
MEMBERS = {name: Member(NOBODY + i, 0.0) for i, name in enumerate(("judges", "actor-0", "actor-1"))}


def reported(run: Path) -> None:
    now = time.monotonic()

    def worker(name: str, service: str, pid: int, busy: int) -> WorkerHealth:
        return WorkerHealth(name, pid, "here", [service], now, "here", busy, 64, 9, 0, [])

    workers = [worker(name, "generate", of.pid, 5) for name, of in MEMBERS.items()]
    workers.append(worker("mine-0", "judge.mine", NOBODY + 9, 2))
    queue = Queue(17, 4, 2, now - 7, "tree 8, attempt 1 of 5", ["actor-0", "actor-1"])
    progress = ("updates", 8, 9, True, 3, 5, 1, now - 2, "actor-1")
    told = ({"generate": queue}, workers, 120.0, 1800.0, (time.time(), "judge.x: late"))
    report = Health(os.getpid(), "here", now, time.time(), *progress, *told)
    write_whole(run / health.NAME, report)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder of a run of ten updates whose launcher is this process."""
    monkeypatch.chdir(tmp_path)
    folder = run_folder.make(tmp_path / "run", [i / 10 for i in range(10)], ended=False)
    log, killed = "actor-0.log", "killed by signal 9"
    death = Failure(time.time() - 60, "actor-0", killed, log, "again in 1 s")
    own = psutil.Process().create_time()
    write_whole(folder / record.NAME, Record(os.getpid(), own, members=MEMBERS, failures=[death]))
    reported(folder)
    return folder


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(
    run: Path, width: int = 80, height: int = 24
) -> AsyncIterator[tuple[WatchApp, Pilot[None]]]:
    app = WatchApp(run)
    async with app.run_test(size=(width, height), notifications=True) as pilot:
        await until(lambda: app.look)
        await pilot.pause()
        yield app, pilot


def screen(app: WatchApp) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


SEEN = ["reward +0.00 ▁▂▃▃▄▅▆▆▇█ +0.90", "actor-0: killed by signal 9; again", "judge.x: late"]


async def test_a_live_run_fits_the_terminal(run: Path) -> None:
    async with watching(run) as (app, _):
        await until(lambda: all(words in " ".join(screen(app).split()) for words in SEEN))
        assert max(map(len, screen(app).splitlines())) <= 80


@pytest.mark.second
@pytest.mark.parametrize(
    ("keys", "order", "asks", "said"),
    [
        ("p", "pause", "Pause the run?", ["run"]),
        ("s", "stop", "Stop the run?", ["run"]),
        ("down d", "drain", "Drain actor-0?", ["run", "actor-0"]),
    ],
)
async def test_every_key_that_harms_asks_once_more(
    run: Path, keys: str, order: str, asks: str, said: list[Any], monkeypatch: Patch
) -> None:
    orders: list[list[Any]] = []

    def ordered(run: Path, **worker: str) -> str:
        orders.append([run.name, *worker.values()])
        return "it is done"

    monkeypatch.setattr(control, order, ordered)
    async with watching(run) as (app, pilot):
        await pilot.press(*keys.split())
        await until(lambda: asks in screen(app))
        await pilot.press("n")
        await until(lambda: asks not in screen(app))
        assert orders == []
        await pilot.press(keys[-1])
        await until(lambda: asks in screen(app))
        await pilot.press("y")
        await until(lambda: "it is done" in screen(app))
        assert orders == [said]


@pytest.mark.second
@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("journal.sqlite", b"no journal" * 100, "cannot be read"),
        ("metrics.jsonl", b"\xff\n[1]\n{}\n", "curves: no update"),
    ],
)
async def test_what_is_missing_or_damaged_is_said_and_the_view_lives(
    run: Path, file: str, damage: bytes, says: str
) -> None:
    (run / file).write_bytes(damage)
    async with watching(run, 80, 40) as (app, pilot):
        assert says in " ".join(screen(app).split())
        await pilot.press("enter", "tab", "escape", "d")
        assert app.is_running


def test_without_a_terminal_the_status_is_printed(run: Path, said: Said) -> None:
    assert "update 8 of 168 (updates)" in said(main, run)
