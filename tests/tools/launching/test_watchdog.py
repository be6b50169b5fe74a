"""Which processes count as stuck."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.scheduler.telemetry.health import NAME, Health, Queue, WorkerHealth
from coppice.tools.launching.watchdog import HELD_UP_S, SCHEDULER, Watchdog

LIMIT, STALL = 100.0, 1000.0
PIDS = {SCHEDULER: 2**22 + 1, "judges": 2**22 + 2, "learner-0": 2**22 + 3}
"""Numbers that no process has."""


def report(
    run: Path, at: float, progress_at: float = 0.0, stuck: str = "", phase: str = "updates",
    **judges: Any,
) -> None:  # fmt: skip
    whole = WorkerHealth(
        "judges", PIDS["judges"], "here", ["judge.x"], at, "here", 0, 4, 9, 0, ["judge.x: ok"]
    )
    worker = msgspec.structs.replace(whole, **judges)
    learner = msgspec.structs.replace(whole, name="learner", pid=PIDS["learner-0"])
    health = Health(
        PIDS[SCHEDULER], "here", at, 0.0, phase, 1, 9, True, 2, 5, 1, progress_at, stuck,
        {"judge.x": Queue(3, 1, 1, at - 7, "tree 4", ["judges"])}, [worker, learner], LIMIT, STALL,
    )  # fmt: skip
    (run / NAME).write_bytes(msgspec.json.encode(health))


@pytest.fixture
def dog(tmp_path: Path) -> Watchdog:
    dog = Watchdog(tmp_path)
    dog._calm_since, dog._looked = 0.0, 5000.0
    return dog


@pytest.mark.parametrize(
    ("judges", "why"),
    [
        ({"heard": 4990.0 - LIMIT, "state": "silent for 20 s"}, "has been silent for 110 s"),
        ({"heard": 4990.0 - LIMIT, "state": "drained"}, "left 110 s ago (drained) and has not"),
        ({"heard": 0.0, "host": "elsewhere"}, None),
        ({"unanswered": 2}, None),
        ({"stalled": 3}, "answers heartbeats and let many of its calls stall"),
        ({"unanswered": 3}, "answers heartbeats and let 3 calls in a row pass their deadline"),
    ],
)
def test_a_worker_of_this_launch_that_does_not_answer_is_stuck(
    judges: dict[str, Any], why: str | None, dog: Watchdog, tmp_path: Path
) -> None:
    report(tmp_path, 5000.0, 5000.0, **judges)
    finding = dog.look(PIDS, 5000.0)
    assert (finding is None) == (why is None)
    assert finding is None or (finding.process == "judges" and finding.why.startswith(str(why)))


def test_a_scheduler_whose_report_grows_old_is_stuck(dog: Watchdog, tmp_path: Path) -> None:
    report(tmp_path, 4990.0 - LIMIT, 4990.0 - LIMIT)
    held_up = Watchdog(tmp_path)
    held_up._calm_since, held_up._looked = 0.0, 4990.0 - HELD_UP_S
    assert held_up.look(PIDS, 5000.0) is None
    finding = dog.look(PIDS, 5000.0)
    assert finding is not None
    assert (finding.process, finding.why) == (SCHEDULER, "has not reported for 110 s")


def test_a_report_of_an_earlier_scheduler_says_nothing(dog: Watchdog, tmp_path: Path) -> None:
    report(tmp_path, 1.0, heard=0.0)
    assert dog.look(PIDS | {SCHEDULER: 2**22 + 9}, 5000.0) is None


def test_what_holds_up_the_run_is_replaced(dog: Watchdog, tmp_path: Path) -> None:
    report(tmp_path, 5000.0, 5000.0 - STALL, "judges")
    assert dog.look(PIDS, 5000.0) is None
    report(tmp_path, 5001.0, 5000.0 - STALL, "judges")
    first = dog.look(PIDS, 5001.0)
    assert first is not None
    assert (first.process, first.whole) == ("judges", False)
    assert first.why.startswith("holds up the run: no node, group or update for 1001 s (updates)")
    assert dog.look(PIDS, 5001.5) is None
    report(tmp_path, 5002.0 + STALL, 5000.0 - STALL, "judges")
    dog._looked = 5002.0 + STALL
    second = dog.look(PIDS, 5002.0 + STALL)
    assert second is not None
    assert (second.process, second.whole) == (SCHEDULER, True)


def test_a_learner_that_holds_up_the_run_has_it_resumed(dog: Watchdog, tmp_path: Path) -> None:
    report(tmp_path, 5000.0, 0.0, "learner", phase="stopping")
    assert dog.look(PIDS, 5000.0) is None
    report(tmp_path, 5000.0, 0.0, "learner")
    finding = dog.look(PIDS, 5000.0)
    assert finding is not None
    assert (finding.process, finding.whole) == ("learner-0", True)
