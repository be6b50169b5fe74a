"""An exception of one tree is that tree's: the run goes on, and ends only when most trees fail."""

import asyncio
import errno
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.actors.environments.tictactoe.environment import TicTacToe, TicTacToeState
from coppice.scheduler.config import EvaluationConfig
from coppice.scheduler.growth.open_trees import OpenTrees
from coppice.scheduler.ledger import stream
from coppice.scheduler.ledger.journal import JournalError, TreeRow
from coppice.wire import arrays
from coppice.wire.faults import Fault
from tests.scheduler.test_begin import QUESTIONS, SETTINGS, UPDATES, House, journal_of


class Failing(TicTacToe):
    """A game whose steps raise ``errors``, one after the other, and then the error ``always``. The
    error None is a state that msgpack cannot hold."""

    errors: list[BaseException | None] = []
    always: BaseException | None = None
    unmakeable: set[int] = set()
    """Seeds, by their order of asking, whose task cannot be made."""
    unmeasurable: set[int] = set()
    """Trees, by the order of their end, that cannot be measured."""
    asked = measured_trees = 0
    closing: BaseException | None = None
    replies = Environment.replies

    def __init__(self) -> None:
        super().__init__(prompt="tictactoe_compact", opponents={"random": 1.0})

    async def close(self) -> None:
        if self.closing is not None:
            raise self.closing

    def task(self, seed: int) -> Task:
        Failing.asked += 1
        if Failing.asked - 1 in self.unmakeable:
            raise LookupError(f"no room for seed {seed}")
        return super().task(seed)

    def measures(self, task: Task, turns: Any) -> dict[str, list[float]]:
        Failing.measured_trees += 1
        if Failing.measured_trees - 1 in self.unmeasurable:
            raise ZeroDivisionError(f"no mean of {task.id}")
        return super().measures(task, turns)

    async def step(self, state: TicTacToeState, action: Action, tools: Tools) -> Transition:
        if not self.errors and self.always is None:
            return await super().step(state, action, tools)
        error = self.errors.pop(0) if self.errors else self.always
        if error is None:
            odd = msgspec.structs.replace(state, opponent=cast(Any, 2**70))
            return Transition(odd, "the end", True, 1.0, self.lost(state))
        raise error


class GaveUp(BaseException):
    """What no handler of Exception sees, like the panic of a library in Rust."""


Play = Callable[..., Awaitable[list[TreeRow]]]


@pytest.fixture
def play(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays a whole run whose environment fails in the given ways; returns its trees."""

    async def played(heldout: int = 0, **failures: Any) -> list[TreeRow]:
        fresh = {
            "errors": [],
            "always": None,
            "unmakeable": (),
            "unmeasurable": (),
            "closing": None,
        }
        for name, value in {**fresh, "asked": 0, "measured_trees": 0, **failures}.items():
            monkeypatch.setattr(Failing, name, value)
        settings = msgspec.structs.replace(SETTINGS, evaluation=EvaluationConfig(questions=heldout))
        more = {"environment": f"{__name__}:Failing", "options": {}, "scheduler": settings}
        await House(tmp_path, llama, **more).live()
        return journal_of(tmp_path).trees()

    return played


async def test_an_exception_of_one_tree_quarantines_it_and_the_run_goes_on(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled, deep = asyncio.CancelledError("nobody's"), RecursionError("deep")
    ends = [SystemExit("a library's"), GaveUp("a panic")]
    rows = await play(errors=[ValueError("odd \ud800"), cancelled, deep, None, *ends])
    assert [row.status for row in rows].count("closed") == QUESTIONS * UPDATES
    reasons = sorted(str(row.reason) for row in rows if row.status == "quarantined")
    assert [reason.partition("\n")[0] for reason in reasons] == [
        "CancelledError: nobody's",
        "OverflowError: can't serialize ints < -2**63 or > 2**64 - 1",
        "RecursionError: deep",
        "RuntimeError: GaveUp: a panic",
        "RuntimeError: SystemExit: a library's",
        "ValueError: odd \\ud800",
    ]
    assert all("Traceback (most recent call last)" in reason for reason in reasons)
    assert all("in step" in reason for reason in (reasons[0], *reasons[2:]))
    assert "a tree fails: ValueError: odd \\ud800 (task " in capsys.readouterr().out


async def test_a_task_that_cannot_be_made_quarantines_its_tree(play: Play) -> None:
    rows = await play(unmakeable={0, 2, 3})
    assert [row.status for row in rows].count("closed") == QUESTIONS * UPDATES
    odd = [row for row in rows if row.status == "quarantined"]
    assert odd and all(row.task == f"draw {row.position}" for row in odd)
    for row in odd:
        assert "LookupError: no room for seed" in str(row.reason)
        assert "Traceback" in str(row.reason)


async def test_an_exception_of_a_held_out_tree_leaves_the_evaluation_to_the_others(
    play: Play, tmp_path: Path
) -> None:
    rows = await play(heldout=3, unmeasurable={0})
    (odd,) = [row for row in rows if row.status == "quarantined"]
    assert odd.split == "heldout" and f"no mean of {odd.task}" in str(odd.reason)
    evaluations = journal_of(tmp_path).evaluations()
    counts = [(name, result["questions"]) for _, name, result in evaluations]
    assert counts == [("start", 2), ("end", 3)]


async def test_an_environment_in_which_no_tree_survives_ends_the_run(
    play: Play, tmp_path: Path
) -> None:
    told = r"^2\d tasks were quarantined; the last reason: ZeroDivisionError: every .*Failing"
    with pytest.raises(Fault, match=told):
        await play(always=ZeroDivisionError("every time"))
    assert 20 < len(journal_of(tmp_path).trees("status='quarantined'")) < 30


async def test_an_environment_that_cannot_be_closed_ends_as_well(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    rows = await play(closing=RuntimeError("still open"))
    assert [row.status for row in rows] == ["closed"] * QUESTIONS * UPDATES
    assert "could not be closed" in caplog.text and "still open" in caplog.text


async def test_an_environment_that_breaks_after_many_good_trees_ends_the_run_as_soon(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = OpenTrees.begin

    def begun(trees: OpenTrees, *given: Any) -> None:
        trees._quarantined = -10_000  # as far from the first rule as after many updates
        begin(trees, *given)

    monkeypatch.setattr(OpenTrees, "begin", begun)
    with pytest.raises(Fault, match="the last reason: ZeroDivisionError"):
        await play(always=ZeroDivisionError("every time"))
    number = len(journal_of(tmp_path).trees("status='quarantined'"))
    assert 20 + 2 * QUESTIONS < number < 30 + 2 * QUESTIONS


async def test_a_group_that_no_message_can_hold_is_its_trees_fault_before_it_is_journaled(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LIMITS", arrays.Limits(max_total_bytes=100))
    with pytest.raises(Fault, match="a group cannot be sent to the learner: a message of"):
        await play()
    assert journal_of(tmp_path).next_group() == 0


DISK = sqlite3.OperationalError("disk I/O error")
OF_THE_RUN = [OSError(errno.ENOSPC, "full"), JournalError("no room"), DISK, MemoryError()]


@pytest.mark.parametrize("error", OF_THE_RUN, ids=lambda error: type(error).__name__)
async def test_a_full_disk_a_failing_journal_and_no_memory_are_the_runs(
    play: Play, tmp_path: Path, error: Exception
) -> None:
    with pytest.raises(type(error)):
        await play(errors=[error])
    assert not journal_of(tmp_path).trees("status='quarantined'")
