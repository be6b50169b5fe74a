"""Two schedulers behind one learner, killed and stopped: no task is lost, none is trained twice,
and no token is older than the bound."""

import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coppice.common import shards
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import health
from coppice.tools.inspecting.audit import audit
from coppice.tools.launching import control
from tests.chaos import world
from tests.chaos.run import Struck
from tests.forks import Server

OTHERS = ("scheduler", "learner-0", "actor-0", "actor-1", "judges-1", "retriever-1")
Lived = tuple[Path, dict[str, Any]]


def paused(run: Struck, wanted: bool) -> None:
    run.wait(lambda: {one.paused for one in health.read_all(run.folder)} == {wanted}, "pause", 20)


@pytest.fixture(scope="module")
def lived(server: Server, searching: Path, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """The folder of the run, and what was seen of it. Both schedulers are paused. The second one is
    killed twice, which must leave everything else as it was, then the first one, which resumes the
    whole run, then all. At last the run is stopped as by Ctrl-C, and resumed to its end."""
    with closing(Struck(searching, tmp_path_factory.mktemp("two") / "run", server, 2)) as run:
        run.out = run.folder.with_name("launcher.out")
        run.launch(f"{world.settings(2)} learner.count=1")
        run.moved(2)
        control.pause(run.folder)
        paused(run, True)
        control.resume(run.folder)
        paused(run, False)
        before = run.pids()
        for _ in range(2):
            run.signal("scheduler-1", signal.SIGKILL)
            run.moved(3)
        after = run.pids()
        run.signal("scheduler", signal.SIGKILL)
        run.moved(2)
        run.kill_all()
        said = run.said()
        run.resume()
        run.moved(2)
        return run.folder, {
            "untouched": [name for name in OTHERS if before[name] == after[name]],
            "replaced": before["scheduler-1"] != after["scheduler-1"],
            "status": run.stop_and_end(),
            "said": said,
        }


def test_the_death_of_the_second_scheduler_leaves_everything_else_as_it_was(lived: Lived) -> None:
    _, seen = lived
    assert seen["untouched"] == list(OTHERS)
    assert seen["replaced"]
    assert seen["said"].count("scheduler-1: killed by signal 9 (SIGKILL)") == 2
    assert seen["said"].count("resuming the run in") == 1  # after the death of the first one
    assert seen["said"].count("paused: no new tree begins") == 1
    assert seen["status"] == 0


def test_every_task_of_both_is_trained_once_within_the_bound(lived: Lived) -> None:
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
