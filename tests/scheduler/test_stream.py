"""The versions of which the stream tells, whatever the order in which the learner's answers arrive."""

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np

from scheduler.journal import Journal
from scheduler.stream import Stream
from scheduler.tree import Tree
from wire.messages import Closed, Trained, TrainGroup, TreeClosed, Turn


class LateLearner:
    """Answers groups when the test says so."""

    def __init__(self) -> None:
        self.answers: dict[int, asyncio.Future[Trained]] = {}

    async def call(self, service: str, request: TrainGroup | TreeClosed, deadline: float) -> Trained | Closed:
        if isinstance(request, TreeClosed):
            return Closed()
        self.answers[request.id] = asyncio.get_running_loop().create_future()
        return await self.answers[request.id]


async def test_each_version_is_told_once_even_one_that_arrives_after_a_newer_one(tmp_path: Path) -> None:
    journal, learner, told = Journal(tmp_path / "j"), LateLearner(), list[tuple[int, int]]()

    async def on_trained(trained: Trained) -> None:
        told.append((trained.version, stream.version))

    stream = Stream(cast(Any, learner), journal, on_trained)
    stream.version, stream.told = 1, {0, 1}
    tree = Tree(0, "task")
    tree.add(None, "prompt", np.arange(3, dtype=np.int32), "prompt")
    journal.start_tree(tree, 0, 1)
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
