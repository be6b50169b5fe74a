"""coppice watch: what it shows at every size and of every broken run, what its keys do, and how
little it reads."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from textual.pilot import Pilot

from coppice.common.atomic import write_whole
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health, Queue, WorkerHealth
from coppice.tools.inspecting import watch
from coppice.tools.inspecting.watch import WatchApp, main, spark
from coppice.tools.launching import control, record, status
from coppice.tools.launching.config import DEFAULT_CONFIG, load
from coppice.tools.launching.record import Failure, Member, Record
from coppice.tools.launching.status import ProcessStatus
from coppice.wire.messages import Turn

NOW, MONOTONIC = 1_800_000_000.0, 5_000.0
MEMBERS = ("scheduler", "judges", "retriever", "actor-0", "actor-1", "learner-0", "learner-1")
STATES = {"actor-1": "stopped", "learner-1": "disk-sleep"}


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plant(journal: Journal, number: int, status: str = "closed") -> None:
    """A tree of two candidates with the rewards number / 10 and -number / 20."""
    tree = Tree(number, f"task {number}")
    root = tree.add(None, "prompt", ids(1, 2), f"What is the capital of country {number}?")
    for reward in (number / 10, -number / 20):
        scores = {"reward": reward, "outcome": 1.0}
        node = tree.add(
            root, "action", ids(3, 4, 5), f"<answer> city {number} </answer>", scores=scores
        )
        node.logprobs, node.versions = np.full(3, -0.5, np.float32), ids(3, 3, 3)
        node.chosen, node.notes = reward > 0, {"slate_rules": "it is right"}
    journal.start_tree(tree, number, number // 3)
    if status != "growing":
        journal.save_group(tree, number, [Turn(node.id, 0, 0, {"reward": 1.0})])
        journal.mark_trained(number, number // 3 + 1)
        journal.close_tree(tree, status)


def a_record(version: int) -> dict[str, float]:
    return {
        "version": version,
        "learner/groups": 8.0,
        "score/reward": version / 10 - 0.5,
        "rollout/outcome": version / 10,
        "score/valid": 1.0,
        "busy/engine": 0.5 + version / 40,
        "busy/learner": 0.75,
        "cache/hit_rate": 0.4,
        "rate/decoded_tokens": 900.0 + version,
        "learner/staleness_mean": 0.75,
    }


def lines(*versions: int) -> bytes:
    return b"".join(msgspec.json.encode(a_record(version)) + b"\n" for version in versions)


def reported(run: Path, paused: bool = False) -> None:
    """Write the scheduler's report."""

    def worker(name: str, service: str, pid: int, busy: int = 0, silent_s: float = 1.0) -> Any:
        heard = MONOTONIC - silent_s
        return WorkerHealth(name, pid, "here", [service], heard, "here", busy, 64, 9, 0, [])

    workers = [
        worker("judges", "judge.slate_rules", 101, 3),
        worker("retriever", "retrieve", 102),
        worker("actor-0", "generate", 103, 12),
        worker("actor-1", "generate", 104, 5, 70.0),
        worker("mine-0", "judge.mine", 900),
    ]
    queue = Queue(17, 4, 2, MONOTONIC - 7, "tree 8, attempt 1 of 5", ["actor-0", "actor-1"])
    progress = ("updates", 8, 9, True, 3, 5, 1, MONOTONIC - 2, "actor-1")
    fault = (NOW - 5, "judge.slate_rules: mine-0 gave 2 judgements for 3 turns")
    told = ({"generate": queue}, workers, 120.0, 1800.0, fault)
    body = Health(100, "here", MONOTONIC - 1, NOW, *progress, *told, paused=paused)
    write_whole(run / health.NAME, body)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run that seems to live, seen at one fixed moment."""
    folder = tmp_path.resolve() / "run"
    folder.mkdir()
    monkeypatch.chdir(folder.parent)
    write_whole(folder / "config.json", load(DEFAULT_CONFIG, ["scheduler.updates=9"]))
    journal = Journal(folder / "journal.sqlite")
    for number in range(12):
        status_of = "growing" if number > 9 else "quarantined" if number == 4 else "closed"
        plant(journal, number, status_of)
    means = {"em": 0.41, "em_2_hop": 0.11, "f1": 0.5, "valid": 0.99}
    measures = {name: {"mean": mean, "half": 0.08} for name, mean in means.items()}
    result = {"version": 0, "questions": 128, "headline": "em", "measures": measures}
    journal.save_evaluation(0, "start", result)
    journal.close()
    (folder / "metrics.jsonl").write_bytes(lines(*range(1, 9)) + b'{"version": 9, "learner/gro')
    members = {
        name: Member(100 + place, NOW - 200, int(name == "actor-0"))
        for place, name in enumerate(MEMBERS)
    }
    killed, log = "killed by signal 9 (SIGKILL)", str(folder / "logs" / "actor-0.log")
    death = Failure(NOW - 60, "actor-0", killed, log, "starting it again in 1 s")
    write_whole(folder / record.NAME, Record(99, NOW - 250, members=members, failures=[death]))
    reported(folder)

    def process(run: Path, name: str, member: Member, heard: float | None) -> ProcessStatus:
        state, age = STATES.get(name, "sleeping"), NOW - member.began
        return ProcessStatus(name, member.pid, state, member.restarts, age, 100.0, heard)

    clock = SimpleNamespace(time=lambda: NOW, monotonic=lambda: MONOTONIC)
    for module in (status, watch):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(status, "_process", process)
    monkeypatch.setattr(Record, "alive", True)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield folder
    monkeypatch.undo()
    time.tzset()


async def until(condition: Callable[[], object]) -> None:
    """Wait for it."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(
    run: Path, width: int = 80, height: int = 24
) -> AsyncIterator[tuple[WatchApp, Pilot[None]]]:
    """The view after its first look."""
    app = WatchApp(run)
    async with app.run_test(size=(width, height), notifications=True) as pilot:
        await until(lambda: app.look)
        await pilot.pause()
        yield app, pilot


def screen(app: WatchApp) -> str:
    """What is on the screen, as text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


SEEN = {
    40: ["update 8 of 9 (updates)"],
    80: [
        "reward -0.40 ▁▂▃▄▅▆▇█ +0.30 valid 1.00",
        "waits for generate: 17 at actor-0, actor-1, 4 waiting; the oldest since 6 s",
        "(60 s ago) actor-0: killed by signal 9 (SIGKILL); starting it again in 1 s",
        "to do: actor-1 hangs; the launcher will replace it",
        "9 closed 3 4 2 +0.23 +1.00 task 9",
    ],
    160: [
        "10 growing 3 - - - - task 10",
        "actor-1 104 stopped 3 min 0 100 MiB 70 s 5/64",
        "mine-0 900 on here - - - 0 s 0/64",
    ],
}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 40), (40, 15)])
async def test_a_live_run_fits_the_terminal(run: Path, width: int, height: int) -> None:
    async with watching(run, width, height) as (app, _):
        await until(lambda: all(words in " ".join(screen(app).split()) for words in SEEN[width]))
        assert max(map(len, screen(app).splitlines())) <= width


async def test_a_paused_run_says_so_and_offers_to_resume(run: Path) -> None:
    (run / health.PAUSED).touch()
    async with watching(run) as (app, _):
        assert "pausing at the scheduler's next heartbeat" in screen(app)
    reported(run, paused=True)
    async with watching(run) as (app, pilot):
        assert "paused: no new tree begins, 3 still grow" in screen(app)
        await until(lambda: "r Resume" in screen(app))
        assert "Pause" not in screen(app)
        await pilot.press("r")
        await until(lambda: not (run / health.PAUSED).exists())
        await until(lambda: "resuming at the scheduler's next heartbeat" in screen(app))


@pytest.mark.parametrize(
    ("keys", "order", "asks", "said"),
    [
        ("p", "pause", "Pause the run?", ["run"]),
        ("s", "stop", "Stop the run?", ["run"]),
        ("down down down d", "drain", "Drain actor-0?", ["run", "actor-0"]),
    ],
)
async def test_every_key_that_harms_asks_once_more(
    run: Path, keys: str, order: str, asks: str, said: list[Any], monkeypatch: pytest.MonkeyPatch
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


# ----------------------------------------------------------------------------------------------
# what is broken


def no_run(run: Path) -> None:
    for path in run.iterdir():
        if path.name != "config.json":
            path.unlink()


def no_database(run: Path) -> None:
    (run / "journal.sqlite").write_text("no database" * 100)


def torn_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"\xff\n[1]\n{}\n")


def torn_journal(run: Path) -> None:
    body = (run / "journal.sqlite").read_bytes()
    (run / "journal.sqlite").write_bytes(body[: len(body) // 2])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_run, "damaged: journal.sqlite is not there"),
        (torn_journal, "cannot be read (database disk image is malformed)"),
        (no_database, "damaged: journal.sqlite cannot be read"),
        (lambda run: (run / health.NAME).write_text("["), "damaged: health.json cannot be read"),
        (lambda run: (run / record.NAME).unlink(), "damaged: launcher.json is not there"),
        (lambda run: (run / "config.json").write_text("{"), "damaged: config.json is torn"),
        (torn_metrics, "curves: no update is recorded yet"),
        (lambda run: (run / "metrics.jsonl").unlink(), "curves: no update is recorded yet"),
    ],
)
async def test_what_is_missing_or_damaged_is_said_and_the_view_lives(
    run: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(run)
    async with watching(run, 80, 40) as (app, pilot):
        assert says in " ".join(screen(app).split())
        await pilot.press("enter", "tab", "escape", "d")
        assert app.is_running


async def test_a_journal_alone_shows_its_trees_and_takes_no_orders(run: Path) -> None:
    alone = run.parent / "copy.sqlite"
    shutil.copy(run / "journal.sqlite", alone)
    async with watching(alone) as (app, pilot):
        assert "copy.sqlite: a journal (without the folder of its run" in screen(app)
        assert not any(key in screen(app) for key in ("Pause", "Stop", "Drain"))
        await pilot.press("s", "p")
        assert "task 9" in screen(app)


# ----------------------------------------------------------------------------------------------
# reading


def test_a_sparkline_spans_its_least_to_its_largest_value() -> None:
    assert spark([0.0, 1.0, 2.0, 7.0], 10) == "▁▂▃█"
    assert spark([0.0, 2.0, 6.0, 8.0], 2) == "▁█"
    assert spark([3.0] * 4, 3) == "▅▅▅"
    assert len(spark(list(range(1000)), 17)) == 17


# ---------------------------------------------------------------------------------------------- the
# command


def test_without_a_terminal_the_status_is_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    page = status.page(status.gather(run, MONOTONIC))
    assert capsys.readouterr().out.splitlines() == page
