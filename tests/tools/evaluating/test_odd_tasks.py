"""An exception of one task of an evaluation is that task's; a full disk is the evaluation's."""

import errno
from pathlib import Path

import pytest

from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.examination import HOPELESS, JournaledTasks
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Sample


async def test_an_odd_exception_gives_up_its_task_with_the_traceback(tmp_path: Path) -> None:
    tasks = JournaledTasks(tmp_path, 3, "games", "played", 1)

    async def grow(tree: Tree, said: list[Sample]) -> None:
        if tree.id == 1:
            raise ZeroDivisionError("an odd board")

    trees = [await tasks.task(position, f"board {position}", 0, grow) for position in range(3)]
    assert [tree is None for tree in trees] == [False, True, False]
    assert tasks.undone["board 1"].startswith("ZeroDivisionError: an odd board\nTraceback")
    assert [row.status for row in tasks.journal.trees()] == ["closed", "quarantined", "closed"]


async def test_tasks_that_all_raise_give_up_the_evaluation(tmp_path: Path) -> None:
    tasks = JournaledTasks(tmp_path, HOPELESS, "games", "played", 1)

    async def grow(tree: Tree, said: list[Sample]) -> None:
        raise KeyError("board")

    for position in range(HOPELESS - 1):
        assert await tasks.task(position, f"board {position}", 0, grow) is None
    with pytest.raises(InfrastructureFault, match="the last reason: KeyError: 'board'"):
        await tasks.task(HOPELESS, "the last board", 0, grow)


async def test_a_full_disk_ends_the_evaluation(tmp_path: Path) -> None:
    tasks = JournaledTasks(tmp_path, 1, "games", "played", 1)

    async def grow(tree: Tree, said: list[Sample]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await tasks.task(0, "board", 0, grow)
    assert not tasks.undone
