"""Tasks in epoch order: each epoch is a fresh shuffle by seed, a position names one draw, so a resumed run skips no task."""

import random

from actors.environments.base import Rejected, Task
from actors.environments.task_files import load_tasks


class Tasks:
    """The training tasks. ``rejected`` rows are quarantined with their reasons."""

    def __init__(self, source: str, seed: int):
        self.tasks: list[Task]
        self.rejected: list[Rejected]
        self.tasks, self.rejected = load_tasks(source)
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, position: int) -> Task:
        """The task of draw ``position`` (0, 1, ...)."""
        epoch, place = divmod(position, len(self.tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self.tasks[self._order[place]]


def held_out(source: str, count: int) -> list[Task]:
    """The fixed held-out subset: the same ``count`` tasks for every seed (all when there are fewer)."""
    tasks, _ = load_tasks(source)
    random.Random(0).shuffle(tasks)
    return tasks[:count]
