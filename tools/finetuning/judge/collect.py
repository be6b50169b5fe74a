"""Collects trajectories of search questions from the journals of runs, each with the turns that a
process judge sees: all but the last.

Every trajectory that cannot be used is counted by its reason.
"""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import listed, load_tasks
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating import judged
from coppice.tools.evaluating.judge_bench.record import Step, Trajectory, recorded


def task_files(folder: Path) -> list[Path]:
    """Return those task sources of a run that are files. Raises FileNotFoundError or ValueError if
    ``folder`` is not a run."""
    process = judged.process(folder)
    sources = [Path(source) for source in (*listed(process.train), *listed(process.heldout))]
    return [path for path in sources if path.is_file()]


class Run:
    """A run folder with the environment and the tasks that the run had. prefix: the beginning of
    the trajectories' ids.

    Raises FileNotFoundError or ValueError if the folder is not a search run. ``trajectories`` may
    be called once: it closes the journal.
    """

    def __init__(self, folder: Path, split: str, prefix: str = ""):
        self.folder, self.split, self.name = folder, split, f"{prefix}{folder.name}"
        process = judged.process(folder)
        environment = registry.load(process.environment, process.options)
        if not isinstance(environment, SearchQA):
            raise ValueError(
                f"{folder} is a run of {process.environment!r}: expected one of search_qa"
            )
        self.environment, self.budget = environment, process.scheduler.budget
        tasks, _ = load_tasks(process.train if split == "train" else process.heldout)
        self.tasks = {task.id: task for task in tasks}
        self.journal = Journal(folder / "journal.sqlite", readonly=True)

    def trajectories(self) -> tuple[list[Trajectory[Step]], Counter[str]]:
        """Return the chosen trajectories of every closed tree, and the counts of skipped ones by
        reason."""
        collected, skipped = [], Counter[str]()
        for row in self.journal.trees("split=?", self.split):
            task = self.tasks.get(row.task)
            if row.status not in ("closed", "replaced"):
                skipped[f"the tree is {row.status}"] += 1
            elif task is None:
                skipped["its question is not in the run's task file"] += 1
            else:
                tree = self.journal.tree(row)
                for number in sorted(
                    {node.trajectory for node in tree.nodes.values() if node.kind == "action"}
                ):
                    trajectory = self._one(tree, number, task)
                    if isinstance(trajectory, str):
                        skipped[trajectory] += 1
                    else:
                        collected.append(trajectory)
        self.journal.close()
        return collected, skipped

    def _one(self, tree: Tree, number: int, task: Task) -> Trajectory[Step] | str:
        actions = tree.actions(number)
        if len(actions) < 2:
            return "it has one turn only: there is nothing to judge"
        outcome = actions[-1].scores.get("outcome")
        if outcome is None:
            return "its last turn has no outcome"
        turns = [
            judged.turn(self.environment, tree, node, task, self.budget) for node in actions[:-1]
        ]
        if any(turn.observation is None for turn in turns):
            return "a turn has no observation"
        return Trajectory(
            id=f"{self.name}-{tree.id}-{number}",
            data_source=task.source,
            question=task.question,
            golden_answers=task.golds,
            outcome=1 if outcome >= 1 else 0,
            steps=[recorded(turn) for turn in turns],
            evidence=task.evidence,
        )


def collect(
    folders: Sequence[Path], split: str, prefix: str = ""
) -> tuple[list[Trajectory[Step]], Counter[str]]:
    """Return the trajectories of several runs. Raises ValueError if two folders share a name, since
    ids begin with ``prefix`` and name."""
    names = [folder.resolve().name for folder in folders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"two runs are called {twice[0]!r}, and ids begin with that name: rename one of the folders, or collect them one by one,"
            " each with a --prefix of its own"
        )
    collected, skipped = [], Counter[str]()
    for folder in folders:
        try:
            trajectories, without = Run(folder.resolve(), split, prefix).trajectories()
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise ValueError(
                f"{folder / 'journal.sqlite'} is no journal of a run ({error}): leave it out"
            ) from None
        collected += trajectories
        skipped += without
    if not collected:
        raise ValueError(
            f"no trajectory of split {split!r} could be used; skipped: {dict(skipped)}"
        )
    return collected, skipped
