"""Two schedulers behind one learner, killed and stopped: no task is lost, none is trained twice,
and no token is older than the bound."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coppice.common import frontier, shards
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Reader
from coppice.tools.inspecting import frames
from coppice.tools.inspecting.audit import audit
from tests.faults.two_schedulers import OTHERS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the run, and what was seen of it."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "tests.faults.two_schedulers", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run", json.loads((folder / "lived.json").read_text())


def test_the_death_of_the_second_scheduler_leaves_everything_else_as_it_was(
    lived: tuple[Path, dict[str, Any]],
) -> None:
    _, seen = lived
    assert seen["untouched"] == list(OTHERS)
    assert seen["replaced"]
    assert seen["said"].count("scheduler-1: killed by signal 9 (SIGKILL)") == 2
    assert seen["said"].count("resuming the run in") == 1  # after the death of the first one
    assert seen["status"] == 0


def test_every_task_of_both_is_trained_once_within_the_bound(
    lived: tuple[Path, dict[str, Any]],
) -> None:
    run, _ = lived
    assert audit(run) == []
    journals = [
        Journal(shards.folder(run, number) / "journal.sqlite", readonly=True) for number in range(2)
    ]
    trees = [journal.trees("split='train'") for journal in journals]
    drawn = sorted(tree.position for rows in trees for tree in rows)
    assert drawn == list(range(len(drawn)))  # as one scheduler would have drawn them
    trained = [
        Counter({version for _, version in journal.groups(tree.id)}.pop() for tree in rows)
        for journal, rows in zip(journals, trees, strict=True)
    ]
    updates = max(version for version in trained[0] if version is not None)
    assert updates >= 15
    assert trained == [dict.fromkeys(range(1, updates + 1), 2)] * 2
    groups = {g: v for journal, rows in zip(journals, trees, strict=True) for tree in rows for g, v in journal.groups(tree.id)}  # fmt: skip
    assert frontier.read(run, updates).groups() == groups


def test_the_run_is_shown_whole(lived: tuple[Path, dict[str, Any]]) -> None:
    run, seen = lived
    records = Reader(run).read()
    assert [record["version"] for record in records] == list(range(1, len(records) + 1))
    assert max(record.get("busy/engines", 0) for record in records) == 2
    drawn = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("count/calls")
    assert drawn
    assert {(point.step, point.value) for point in drawn} <= {
        (r["version"], r.get("count/calls")) for r in records
    }
    with closing(frames.opened(run)) as journal:
        assert len(journal.trees("split='train'")) == 4 * len(records)
    assert seen["said"].count("paused: no new tree begins") == 1
    rows = [
        int(line.split()[0])
        for line in seen["said"].splitlines()
        if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert rows[:3] == [1, 2, 3]
