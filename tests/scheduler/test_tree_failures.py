"""An exception of one tree is that tree's: the run goes on, and ends only when most trees fail.

The run, its dispatcher and its journal are real; the environment is tic-tac-toe that fails as a
test says.
"""

import asyncio
import errno
import sqlite3
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.actors.environments.tictactoe.environment import TicTacToe, TicTacToeState
from coppice.scheduler.config import EvaluationConfig, SchedulerConfig
from coppice.scheduler.ledger.journal import Journal, JournalError, TreeRow
from coppice.wire.faults import Fault
from tests.scheduler.test_begin import QUESTIONS, UPDATES, House

HELD_OUT = 3
SETTINGS = SchedulerConfig(
    strategy="chain",
    judge="none",
    updates=UPDATES,
    questions_per_update=QUESTIONS,
    max_action_tokens=4,
)


class Failing(TicTacToe):
    """A game whose steps raise ``errors``, one after the other, and then the error ``always``. The
    error None is a state that msgpack cannot hold."""

    errors: list[BaseException | None] = []
    always: BaseException | None = None
    unmakeable: set[int] = set()
    """Seeds, by their order of asking, whose task cannot be made."""
    asked = 0
    replies = Environment.replies

    def __init__(self) -> None:
        super().__init__(prompt="tictactoe_compact", opponents={"random": 1.0})

    def task(self, seed: int) -> Task:
        """Return the task of a seed, unless it is one that cannot be made."""
        Failing.asked += 1
        if Failing.asked - 1 in self.unmakeable:
            raise LookupError(f"no room for seed {seed}")
        return super().task(seed)

    async def step(self, state: TicTacToeState, action: Action, tools: Tools) -> Transition:
        """Return the result of the action, or raise the next error."""
        if not self.errors and self.always is None:
            return await super().step(state, action, tools)
        error = self.errors.pop(0) if self.errors else self.always
        if error is None:
            odd = msgspec.structs.replace(state, opponent=cast(Any, 2**70))
            return Transition(odd, "the end", True, 1.0, self.lost(state))
        raise error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    """The environment, whose errors are those of one test."""
    fresh = {"errors": [], "always": None, "unmakeable": set[int](), "asked": 0}
    for name, value in fresh.items():
        monkeypatch.setattr(Failing, name, value)
    return Failing


async def rows_of(folder: Path, model: Path, heldout: int = 0) -> list[TreeRow]:
    """The trees of a whole run whose environment is ``Failing``."""
    settings = msgspec.structs.replace(SETTINGS, evaluation=EvaluationConfig(questions=heldout))
    more = {"environment": f"{__name__}:Failing", "options": {}, "scheduler": settings}
    await House(folder, model, **more).live()
    return Journal(folder / "journal.sqlite", readonly=True).trees()


async def test_an_exception_of_one_tree_quarantines_it_with_the_traceback_and_the_run_goes_on(
    tmp_path: Path, llama: Path, failing: type[Failing], capsys: pytest.CaptureFixture[str]
) -> None:
    cancelled, deep = asyncio.CancelledError("nobody's"), RecursionError("deep")
    failing.errors = [ValueError("odd \ud800"), cancelled, deep, None]
    rows = await rows_of(tmp_path, llama)
    assert [row.status for row in rows].count("closed") == QUESTIONS * UPDATES
    reasons = sorted(str(row.reason) for row in rows if row.status == "quarantined")
    assert [reason.partition("\n")[0] for reason in reasons] == [
        "CancelledError: nobody's",
        "OverflowError: can't serialize ints < -2**63 or > 2**64 - 1",
        "RecursionError: deep",
        "ValueError: odd \\ud800",
    ]
    assert all("Traceback (most recent call last)" in reason for reason in reasons)
    assert all("in step" in reason for reason in (reasons[0], *reasons[2:]))
    assert "a tree fails: ValueError: odd \\ud800 (task " in capsys.readouterr().out


async def test_a_task_that_cannot_be_made_quarantines_its_tree(
    tmp_path: Path, llama: Path, failing: type[Failing]
) -> None:
    failing.unmakeable = {0, 2, 3}
    rows = await rows_of(tmp_path, llama)
    assert [row.status for row in rows].count("closed") == QUESTIONS * UPDATES
    odd = [row for row in rows if row.status == "quarantined"]
    assert odd and all(row.task == f"draw {row.position}" for row in odd)
    for row in odd:
        assert "LookupError: no room for seed" in str(row.reason)
        assert "Traceback" in str(row.reason)


async def test_an_exception_of_one_held_out_tree_leaves_the_evaluation_to_the_others(
    tmp_path: Path, llama: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    measures, failed = Failing.measures, list[str]()

    def once(self: Failing, task: Any, turns: Any) -> Any:
        if not failed:
            failed.append(task.id)
            raise ZeroDivisionError("a mean of nothing")
        return measures(self, task, turns)

    monkeypatch.setattr(failing, "measures", once)
    rows = await rows_of(tmp_path, llama, HELD_OUT)
    (odd,) = [row for row in rows if row.status == "quarantined"]
    assert (odd.split, odd.task) == ("heldout", failed[0])
    assert "ZeroDivisionError" in str(odd.reason)
    evaluations = Journal(tmp_path / "journal.sqlite", readonly=True).evaluations()
    counts = [(name, result["questions"]) for _, name, result in evaluations]
    assert counts == [("start", 2), ("end", 3)]


async def test_an_environment_in_which_no_tree_survives_ends_the_run(
    tmp_path: Path, llama: Path, failing: type[Failing]
) -> None:
    failing.always = ZeroDivisionError("every time")
    told = r"^2\d tasks were quarantined; the last reason: ZeroDivisionError: every time \(task .*Failing"
    with pytest.raises(Fault, match=told):
        await rows_of(tmp_path, llama)
    rows = Journal(tmp_path / "journal.sqlite", readonly=True).trees("status='quarantined'")
    assert 20 < len(rows) < 30


DISK = sqlite3.OperationalError("disk I/O error")
OF_THE_RUN = [OSError(errno.ENOSPC, "full"), JournalError("no room"), DISK, MemoryError()]


@pytest.mark.parametrize("error", OF_THE_RUN, ids=lambda error: type(error).__name__)
async def test_a_full_disk_a_failing_journal_and_no_memory_are_the_runs(
    tmp_path: Path, llama: Path, failing: type[Failing], error: Exception
) -> None:
    failing.errors = [error]
    with pytest.raises(type(error)):
        await rows_of(tmp_path, llama)
    assert not Journal(tmp_path / "journal.sqlite", readonly=True).trees("status='quarantined'")
