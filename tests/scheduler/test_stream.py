"""Groups and closed trees on their way to the learner, and the versions that come back."""

import asyncio
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal, JournalError
from coppice.scheduler.ledger.stream import Stream
from coppice.wire.messages import Closed, Register, Trained, TrainGroup, TreeClosed, Turn
from tests.scheduler.test_journal import small


class LateLearner:
    """Answers groups when the test says so."""

    def __init__(self) -> None:
        self.answers: dict[int, asyncio.Future[Trained]] = {}

    async def call(self, service: str, request: TrainGroup | TreeClosed, deadline: float) -> Any:
        if isinstance(request, TreeClosed):
            return Closed()
        self.answers[request.id] = asyncio.get_running_loop().create_future()
        return await self.answers[request.id]


def planted(journal: Journal, number: int) -> Tree:
    tree = small(number)
    journal.start_tree(tree, number, 0)
    return tree


async def test_each_version_is_told_once_also_after_a_newer_one(tmp_path: Path) -> None:
    journal, learner, told = Journal(tmp_path / "j"), LateLearner(), list[tuple[int, int]]()

    async def on_trained(trained: Trained) -> None:
        told.append((trained.version, stream.version))

    stream = Stream(cast(Any, learner), journal, on_trained)
    stream.version, stream.announced = 1, {0, 1}
    tree = planted(journal, 0)
    for _ in range(5):
        stream.emit(tree, [Turn(0, 0, 1, {})])
    while len(learner.answers) < 5:
        await asyncio.sleep(0)
    for group, version in ((3, 3), (0, 2), (4, 3), (1, 2), (2, 1)):
        learner.answers[group].set_result(Trained(version, "", "", {}))
        while dict(journal.groups(0))[group] is None:
            await asyncio.sleep(0)
    assert told == [(3, 3), (2, 3)]  # version 1 was trained before this start
    assert dict(journal.groups(0)) == {0: 2, 1: 2, 2: 1, 3: 3, 4: 3}
    await stream.stop()


async def test_trees_that_close_together_wait_once_for_the_disk(tmp_path: Path) -> None:
    journal, learner = Journal(tmp_path / "j"), LateLearner()
    stream = Stream(cast(Any, learner), journal, cast(Any, None))
    order: list[str] = []
    sync, call = journal.sync, learner.call

    def counted() -> None:
        assert not journal._due, "a tree that is not committed would not survive a power cut"
        order.append("sync")
        sync()

    async def told(service: str, request: Any, deadline: float) -> Any:
        order.append(f"{service} {request.tree}")
        return await call(service, request, deadline)

    journal.sync, learner.call = counted, told
    for number in range(20):
        tree = planted(journal, number)
        journal.close_tree(tree)
        stream.close(tree)
    await stream.settle(30.0)
    told_of = [event for event in order if event != "sync"]
    assert told_of == [f"close {number}" for number in range(20)]
    assert order[0] == "sync" and order.count("sync") <= 2


async def test_a_group_that_could_not_be_written_is_never_sent(tmp_path: Path) -> None:
    journal, learner = Journal(tmp_path / "j"), LateLearner()
    stream = Stream(cast(Any, learner), journal, cast(Any, None))

    def full(statements: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    journal._commit = full
    tree = planted(journal, 0)
    stream.emit(tree, [Turn(0, 0, 1, {})])
    await stream.settle(30.0)
    assert not learner.answers
    assert isinstance(stream.failure, JournalError) and isinstance(journal.failure, JournalError)
    with pytest.raises(JournalError, match="free some space"):
        journal.close_tree(tree)


async def test_a_second_learner_process_in_one_start_ends_the_run(tmp_path: Path) -> None:
    stream = Stream(cast(Any, LateLearner()), Journal(tmp_path / "j"), cast(Any, None))

    def joined(pid: int, service: str = "train") -> None:
        hello = Register("learner", [service], 1, pid, "here")
        stream.learner_joined(cast(Any, SimpleNamespace(hello=hello)))

    for pid, service in ((7, "train"), (8, "generate"), (7, "train")):
        joined(pid, service)
        assert stream.failure is None
    joined(9)
    assert "the learner was started anew (process 9 on here)" in str(stream.failure)
