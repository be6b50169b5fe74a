"""Tasks in epoch order. A position names one draw, so a resumed run skips none."""

import contextlib
import random
from collections.abc import Callable

from coppice.actors.environments import registry
from coppice.actors.environments.base import HELD_OUT_SEEDS, Environment, RejectedTask, Task
from coppice.actors.environments.task_files import load_tasks, too_few, unusable
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.growth.failures import brief
from coppice.wire.faults import DataFault


class Tasks:
    """The training tasks of one source or several. rejected: rows that cannot work, quarantined.
    in_turn: draw those of each number of hops in turn, each kind in epochs of its own. evidence:
    whether any task has supporting passages."""

    def __init__(
        self, source: str | list[str], seed: int, verbatim: bool = False, in_turn: bool = False
    ):
        self.tasks, self.rejected = load_tasks(source, verbatim)
        self.seed, self.evidence = seed, any(task.evidence for task in self.tasks)
        kinds = sorted({task.hops for task in self.tasks}) if in_turn else [0]
        self._kinds = [[t for t in self.tasks if not in_turn or t.hops == n] for n in kinds]
        self._orders = [(-1, list[int]())] * len(kinds)

    def at(self, position: int) -> Task:
        """The task of draw ``position`` (0, 1, ...)."""
        within, kind = divmod(position, len(self._kinds))
        tasks = self._kinds[kind]
        epoch, place = divmod(within, len(tasks))
        if epoch != self._orders[kind][0]:
            order = list(range(len(tasks)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders[kind] = epoch, order
        return tasks[self._orders[kind][1][place]]


def held_out(
    source: str | list[str], count: int, verbatim: bool = False
) -> tuple[list[Task], list[str]]:
    """The held-out tasks, the same for every seed, and what the user should know of them."""
    tasks, rejected = load_tasks(source, verbatim)
    notes = unusable("held-out set", rejected, len(tasks))
    notes += too_few("held-out set", len(tasks), count)
    random.Random(0).shuffle(tasks)
    return tasks[:count], notes


class GeneratedTasks:
    """Tasks that an environment makes from seeds; training draws those below 2^30, never a held-out
    one. Different seeds may make the same task."""

    def __init__(self, make: Callable[[int], Task], seed: int):
        self.make, self.seed = make, seed
        self.rejected: list[RejectedTask] = []

    @property
    def evidence(self) -> bool:
        """Whether one of the first tasks has supporting passages."""
        made = list[Task]()
        for position in range(16):
            with contextlib.suppress(Exception):  # such a draw's tree is quarantined
                made.append(self.at(position))
        return any(task.evidence for task in made)

    def at(self, position: int) -> Task:
        """The task of draw ``position``; its seed is below 2^30."""
        return self.make(random.Random(f"{self.seed}/{position}").getrandbits(30))

    def held_out(self, count: int) -> list[Task]:
        """The same tasks for every seed of the run. Raises DataFault if one cannot be made."""
        made = []
        for seed in HELD_OUT_SEEDS[:count]:
            try:
                made.append(self.make(seed))
            except Exception as error:
                raise DataFault(
                    f"the environment cannot make its held-out task of seed {seed}: {brief(error)}."
                    " Its task(seed) must return a task for every seed"
                ) from error
        return made


def load(
    process: SchedulerProcess, environment: Environment
) -> tuple[Tasks | GeneratedTasks, list[Task], list[str]]:
    """A run's training tasks, its held-out tasks, and what the user should know of those."""
    count = process.scheduler.evaluation.questions
    if registry.makes_tasks(environment):
        made = GeneratedTasks(getattr(environment, "task"), process.seed)  # noqa: B009
        return made, made.held_out(count), []
    verbatim, in_turn = environment.verbatim, process.scheduler.hops_in_turn
    training = Tasks(process.train, process.seed, verbatim, in_turn)
    return training, *held_out(process.heldout, count, verbatim)
