"""The terminal is told what matters once, and again when it goes on or gets worse."""

from pathlib import Path

import pytest

from coppice.scheduler.telemetry import alerts
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Judgement
from coppice.wire.service import Call
from tests.services import EchoRequest, EchoResult, ask, bench

GROWTH = "wrong trajectories have {} turns, {} times as many as at first, and a turn pays {}"


def test_later_faults_of_a_service_are_told_once_a_minute_with_their_number() -> None:
    clock, lines = [100.0], list[str]()
    faults = alerts.Faults("scheduler", lines.append, lambda: clock[0])
    for _ in range(30):
        faults.failed("judge.a", InfrastructureFault("no"), "tree 1")
        clock[0] += alerts.EVERY_S / 10
    assert len(lines) == 3
    often = "judge.a fails, 10 times in the last 60 s"
    assert lines[1] == f"{often}: no (tree 1; more in logs/scheduler.log)"
    faults.failed("retrieve", InfrastructureFault("no"), "tree 1")
    assert lines[3].startswith("retrieve fails: no")


async def test_each_fault_of_a_named_caller_is_told_also_of_retries(tmp_path: Path) -> None:
    heard: list[tuple[str, str, str]] = []
    faults: list[Exception] = [KeyError("my bug"), DataFault("not this one")]

    async def failing(request: EchoRequest, call: Call) -> EchoResult:
        raise faults.pop(0)

    async with bench(tmp_path) as b:
        b.dispatcher.on_fault = lambda name, fault, caller: heard.append((name, str(fault), caller))
        await b.work("w", {"echo": failing})
        with pytest.raises(DataFault):
            await b.dispatcher.call("echo", ask(), deadline=5, caller="tree 7")
        faults.append(DataFault("nobody asks"))
        with pytest.raises(DataFault):
            await b.dispatcher.call("echo", ask(), deadline=5)
    bug = "w: KeyError: 'my bug'"
    assert heard == [("echo", bug, "tree 7"), ("echo", "w: not this one", "tree 7")]


def test_the_last_worker_of_a_needed_service_that_goes_and_the_next_that_comes_are_told() -> None:
    lines: list[str] = []
    attendance = alerts.Attendance(Path("runs/a"), lines.append)
    attendance.left(["judge.x"], "drained", set())  # nobody waits for it yet
    attendance.needed = {"judge.x": 1, "retrieve": 1}
    attendance.joined("x-plugin", ["judge.x"])
    attendance.left(["judge.x"], "drained", {"judge.x"})
    attendance.left(["judge.other"], "drained", set())
    assert not lines
    attendance.left(["judge.x", "judge.y"], "drained", {"retrieve"})
    attendance.left(["judge.x"], "drained", {"retrieve"})
    attendance.left(["retrieve"], "silent for 21 s", set())
    attendance.joined("x-again", ["judge.x"])
    attendance.joined("x-third", ["judge.x"])
    assert lines == [
        "judge.x: its last worker left (drained); waiting for one: coppice serve ... --run runs/a",
        "retrieve: its last worker left (silent for 21 s); waiting for one",
        "judge.x: x-again is here, going on",
    ]


def test_a_warning_that_stays_is_told_every_tenth_update() -> None:
    reminders, found = alerts.Reminders(), list[int]()
    for version in range(1, 25):
        warning = GROWTH.format(version / 3, 1.5 + version, f"{-version / 7:+.2f}")
        found += [version] * len(reminders.due(version, [warning]))
    assert found == [1, 1 + alerts.EVERY_UPDATES, 1 + 2 * alerts.EVERY_UPDATES]


def test_a_warning_that_was_gone_and_one_of_another_kind_are_told_at_once() -> None:
    reminders = alerts.Reminders()
    growth, norm = GROWTH.format(4.0, 2.0, "+0.10"), "gradient norm 1.3e-05 is 12 times its median"
    assert reminders.due(1, [growth]) == [growth]
    assert reminders.due(2, [growth, norm]) == [norm]
    assert reminders.due(3, [norm.replace("1.3e-05", "200")]) == []
    assert reminders.due(4, [growth]) == [growth]


def test_invalid_scores_warn_with_columns_and_remedy() -> None:
    judged = alerts.JudgeTally("slate", Path("runs/a"))
    whole, half = Judgement({"think": 0.0, "query": 0.0}), Judgement({"think": 0.0}, ["query"])
    assert (judged.take(), judged.share) == ([], None)
    assert judged.note([whole] * 10) == (20, 0)
    assert (judged.take(), judged.share) == ([], 1)
    assert judged.note([whole, half] * 5) == (20, 5)
    (warning,) = judged.take()
    assert "judge slate gave 5 invalid scores of 20 (query 5 of 10)" in warning
    assert "coppice trees runs/a" in warning
    assert (judged.take(), judged.share) == ([], 0.75)  # nothing was judged since
