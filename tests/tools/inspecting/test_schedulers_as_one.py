"""Every tool shows the whole run, also when several schedulers have a part of it each."""

import json
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from coppice.common.atomic import write_whole
from coppice.common.shards import Shard, folder
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health, Queue, WorkerHealth
from coppice.tools.finetuning.marked import marked_rows
from coppice.tools.inspecting import dump, frames, notebook, runs, trace, watch
from coppice.tools.launching import control, record, status
from tests import run_folder
from tests.tools.said import Said

pytestmark = pytest.mark.second


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number in range(2):
        home, exact = folder(tmp_path / "run", number), {} if number else {0: 0.25, 3: 0.75}
        run_folder.make(home, exact=exact, shard=Shard(number, 2))
    return tmp_path / "run"


def test_trees_of_all_journals_are_found(run: Path, said: Said) -> None:
    for place, trees in ((run, "5 4 3 2 1 0"), (folder(run, 1), "5 3 1")):
        lines = said(dump.main, place, "--list").splitlines()[1:]
        assert [line.split()[0] for line in lines] == trees.split()
    assert notebook.OpenedRun(run).nodes["tree"].n_unique() == 6


def test_a_marked_candidate_of_another_scheduler_is_a_row(run: Path) -> None:
    tree = 5
    journal = Journal(folder(run, 1) / "journal.sqlite", readonly=True)
    task = next(row.task for row in journal.trees() if row.id == tree)
    mark = {"tree": tree, "node": 1, "mark": "good", "task": task}
    (run / "marks.jsonl").write_text(json.dumps(mark))
    rows, left_out = marked_rows([run], ["good"])
    assert [(row.group, row.rendered) for row in rows] == [(task, True)] and not left_out


def test_the_trace_has_the_calls_of_all_trees(run: Path) -> None:
    start = trace.recorded(run, runs.read(run).records)
    assert {call.tree for call in start.calls} == set(range(6))
    assert [update.trees for update in start.updates] == [{0, 1}, {2, 3}, {4, 5}]


def test_watch_and_status_see_both(run: Path) -> None:
    look = watch.Watcher(run).look()
    assert [row[0] for row in look.trees] == ["5", "4", "3", "2", "1", "0"]
    assert len(look.records) == 3
    assert status.gather(run, 0.0).trees == {"closed": 6}
    (folder(run, 1) / "journal.sqlite").write_bytes(b"no journal" * 100)
    damaged = status.gather(run, 0.0)
    assert damaged.trees == {"closed": 3}
    assert any("shards/1/journal.sqlite cannot be read" in text for text in damaged.damaged)


def test_pictures_of_several_journals_have_numbers_of_their_own(run: Path) -> None:
    known: dict[int, bytes] = {}
    for number in range(2):
        journal = Journal(folder(run, number) / "journal.sqlite", shard=Shard(number, 2))
        for png in (b"first of %d" % number, b"second of %d" % number):
            known[journal.picture(png)] = png
        journal.close()
    assert sorted(known) == [1, 2, 3, 4]
    journal = frames.opened(run)
    assert journal.pictures(-np.arange(1, 5)) == known
    journal.close()


LEARNER = ("learner", 20, "train")


@pytest.fixture
def reported(run: Path) -> Path:
    """Two schedulers have reported. Each has an actor of its own, and the learner has answered
    both."""
    now = time.monotonic()
    for number in range(2):
        workers = [
            WorkerHealth(name, pid, "here", [service], now - number, "here", 1, 4, 9, 0, [])
            for name, pid, service in ((f"actor-{number}", 11 + number, "generate"), LEARNER)
        ]
        queue = Queue(1, 2 - number, 1, now - 5 - number, f"tree {number}", [f"actor-{number}"])
        idle, fault = now - 3 * number, (now + number, f"fault {number}")
        progress = ("updates", 4, 9, not number, 2, 5, 1 - number, idle, "")
        told = ({"generate": queue}, workers, 120.0, 1800.0, fault, 0.5 * number, not number)
        report = Health(31 + number, "here", now, time.time(), *progress, *told)
        write_whole(folder(run, number) / health.NAME, report)
    return run


def test_one_report_has_everybody_s_workers_and_calls(reported: Path) -> None:
    reports = health.read_all(reported)
    whole = health.joined(reports)
    assert whole is not None
    assert (whole.growing, whole.done, whole.evaluations) == (4, 10, 1)
    assert (whole.lag_s, whole.paused) == (0.5, False)
    assert whole.progress_at == reports[0].progress_at
    assert whole.fault is not None and whole.fault[1] == "fault 1"
    (waits,) = whole.waits()
    assert waits == "generate: 2 at actor-0, actor-1, 3 waiting; the oldest since 6 s, for tree 1"


def test_draining_says_what_the_actors_scheduler_would_lack(reported: Path) -> None:
    own, members = psutil.Process(), {"actor-1": record.Member(12, 0.0)}
    launch = record.Record(own.pid, own.create_time(), members=members)
    write_whole(reported / record.NAME, launch)
    assert "No other worker offers generate" in control.draining(reported, "actor-1")
