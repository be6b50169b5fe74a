"""An exception of one task of an evaluation is that task's; a full disk is the evaluation's."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.base import Task
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.examination import HOPELESS, Evaluation, PolicyOutcomes, PolicyRow
from coppice.tools.evaluating.players import MeasuredPolicy
from coppice.wire.faults import InfrastructureFault


class Version(msgspec.Struct):
    version: int = 0


class Boards(Evaluation):
    unit, done = "games", "played"

    def __init__(self, out: Path, count: int, odd: Callable[[int], None]):
        super().__init__(out, [("", Task(f"board {number}", "?")) for number in range(count)], 1)
        self.odd = odd

    async def play(self) -> PolicyOutcomes:
        nothing: Any = None
        policy = MeasuredPolicy("nobody", {}, nothing, lambda: None)
        return await self.examine(PolicyRow("", Version(), policy, nothing, SchedulerConfig()))

    async def grow(self, row: PolicyRow, context: Context, calls: Any) -> None:
        self.odd(context.tree.id)

    def outcome(self, task: Task, tree: Tree | None) -> bool:
        return tree is not None


def raising(error: Exception) -> Callable[[int], None]:
    def odd(number: int) -> None:
        raise error

    return odd


async def test_an_odd_exception_gives_up_its_task_with_the_traceback(tmp_path: Path) -> None:
    odd = raising(ZeroDivisionError("an odd board"))
    found = await Boards(tmp_path, 3, lambda number: odd(number) if number == 1 else None).run()
    assert found.outcomes == [True, False, True]
    assert found.undone["board 1"].startswith("ZeroDivisionError: an odd board\nTraceback")
    rows = Journal(tmp_path / "journal.sqlite", readonly=True).trees()
    assert [row.status for row in rows] == ["closed", "quarantined", "closed"]


async def test_tasks_that_all_raise_give_up_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFault, match="the last reason: KeyError: 'board'"):
        await Boards(tmp_path, HOPELESS + 3, raising(KeyError("board"))).run()
    rows = Journal(tmp_path / "journal.sqlite", readonly=True).trees()
    assert len(rows) == HOPELESS, "no further task begins"


async def test_a_full_disk_ends_the_evaluation(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        await Boards(tmp_path, 2, raising(full)).run()
