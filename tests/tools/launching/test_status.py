"""coppice watch --status: one page about live, stopped and broken runs, which is only read."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coppice.common.atomic import write_whole
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.health import Health, Queue, WorkerHealth
from coppice.tools.launching import record
from coppice.tools.launching.config import DEFAULT_CONFIG, load
from coppice.tools.launching.record import Failure, Member, Record
from coppice.tools.launching.status import WIDTH, main
from tests.tools.said import Said

NOBODY = 2**22 + 1
"""A number that no process has."""


def launched(run: Path, state: str, pid: int = NOBODY, **members: Member) -> None:
    born = psutil.Process(pid).create_time() if pid != NOBODY else 0.0
    log, killed = str(run / "logs" / "actor-0.log"), "killed by signal 9 (SIGKILL)"
    death = Failure(time.time() - 30, "actor-0", killed, log, "starting it again")
    body = Record(pid, born, state, members, [death], 2, "free some memory")  # pyright: ignore
    write_whole(run / record.NAME, body)


def reported(run: Path, pid: int, idle_s: float = 1.0) -> None:
    now = time.monotonic()
    judge = WorkerHealth("judges", NOBODY, "here", ["judge.x"], now, "here", 3, 4, 9, 0, [])
    health = Health(
        pid, "here", now, time.time(), "updates", 4, 9, True, 2, 5, 1, now - idle_s, "judges",
        {"judge.x": Queue(3, 1, 1, now - 7, "tree 4", ["judges"])}, [judge], 120.0, 1800.0,
        (time.time() - 5, "judge.x: late"),
    )  # fmt: skip
    write_whole(run / "health.json", health)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of nine updates with a closed tree and one that grows."""
    run = tmp_path / "run"
    run.mkdir()
    write_whole(run / "config.json", load(DEFAULT_CONFIG, ["scheduler.updates=9"]))
    book = Journal(run / "journal.sqlite")
    for number in range(2):
        book.start_tree(Tree(number, f"task {number}"), number, 0)
    book.close_tree(Tree(0, "task 0"))
    book.close()
    return run


@pytest.fixture
def page(said: Said, tmp_path: Path) -> Callable[[], str]:
    """The page, whose lines are at most 80 columns wide unless they hold one long word."""

    def shown() -> str:
        lines = said(main, tmp_path / "run").splitlines()
        assert all(len(line) <= WIDTH or str(tmp_path) in line for line in lines), lines
        return " ".join(" ".join(lines).split())

    return shown


def test_a_run_on_another_machine_is_not_said_to_be_killed(
    run: Path, page: Callable[[], str]
) -> None:
    launched(run, "running", actor=Member(NOBODY, time.time()))
    body = record.read(run)
    assert body is not None
    body.host = "node17"
    write_whole(run / record.NAME, body)
    reported(run, NOBODY)
    shown = page()
    assert f"unknown (its launcher {NOBODY} is on node17, which alone sees it)" in shown
    assert "on node17: coppice watch --status" in shown
    assert "ended" not in shown and "; if it is gone, coppice launch --resume" in shown


def test_a_launcher_is_alive_though_somebody_has_set_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, boot = record.Recorder(tmp_path).record, psutil.boot_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: boot + 3600.0)
    assert mine.alive
    mine.boot = 0.0
    assert not mine.alive


def test_a_live_run_has_nothing_to_do(run: Path, page: Callable[[], str]) -> None:
    command = [sys.executable, "-c", "input()", f"{run}/processes/scheduler.json"]
    process = subprocess.Popen(command, stdin=-1)
    try:
        scheduler, judges = Member(process.pid, time.time() - 200, 1), Member(os.getpid(), 0.0)
        launched(run, "running", os.getpid(), scheduler=scheduler, judges=judges)
        reported(run, process.pid)
        told = page()
        for text in (
            f"run {run}: running (launcher {os.getpid()}, since",
            "update 4 of 9 (updates); last progress ",
            " ago tasks: 1 closed, 1 growing",
            f"judges {os.getpid()} ended - 0 - -",  # the number belongs to another process
            "what to do nothing, the run goes on.",
        ):
            assert text in told
        reported(run, process.pid, idle_s=100.0)
        assert f"stacks in the logs: kill -QUIT {os.getpid()}" in page()
    finally:
        process.communicate(b"\n")


def test_a_failed_run_says_how_it_ended_and_its_remedy(run: Path, page: Callable[[], str]) -> None:
    launched(run, "failed")
    reported(run, NOBODY)
    told = page()
    assert f"run {run}: failed (its launcher has ended in order)" in told
    assert told.endswith("what to do free some memory")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("journal.sqlite", "no database" * 100, "journal.sqlite cannot be read (file is not a"),
        ("journal.sqlite", None, "journal.sqlite is not there: no scheduler has begun in this"),
        ("health.json", "[]", "damaged: health.json cannot be read"),
    ],
)
def test_what_is_damaged_is_said_and_the_rest_of_the_page_stays(
    name: str, content: str | None, says: str, run: Path, page: Callable[[], str]
) -> None:
    launched(run, "stopped")
    reported(run, NOBODY)
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    told = page()
    assert says in told and f"coppice launch --resume {run}" in told


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, refused: Said) -> None:
    expected = "no config.json is there; expected the folder of a run, runs/NAME-TIME\n"
    assert refused(main, tmp_path) == f"coppice watch --status {tmp_path}: {expected}"


def test_machines_get_json_and_the_folder_stays_as_it_was(run: Path, said: Said) -> None:
    launched(run, "stopped")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    status = json.loads(said(main, run, "--json"))
    assert (status["state"], status["trees"]) == ("stopped", {"closed": 1, "growing": 1})
    assert {name: (run / name).read_bytes() for name in before} == before
