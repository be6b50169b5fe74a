"""Collects trajectories of search questions from the journals of runs, each with the turns that a
process judge sees: all but the last.

Every trajectory that cannot be used is counted by its reason.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import listed, load_tasks
from coppice.common import shards
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.ledger.journal import Journal, JournalError
from coppice.tools.evaluating import judged
from coppice.tools.evaluating.examination import repeated
from coppice.tools.finetuning.records import RecordedStep, Trajectory, recorded


def task_files(folder: Path) -> list[Path]:
    """Return those task sources of a run that are files. Raises ValueError if ``folder`` is not a
    run."""
    process = judged.process(folder)
    sources = [Path(source) for source in (*listed(process.train), *listed(process.heldout))]
    return [path for path in sources if path.is_file()]


def collect_all(
    folders: Sequence[Path], split: str, prefix: str = ""
) -> tuple[list[Trajectory[RecordedStep]], Counter[str]]:
    """Return the chosen trajectories of the closed trees of runs, whose ids begin with ``prefix``
    and the folder's name, and the counts of skipped ones by reason.

    Raises ValueError if a folder is not a search run, or two share a name.
    """
    if twice := repeated([folder.resolve().name for folder in folders]):
        remedy = "rename one of the folders, or collect them one by one, each with a --prefix"
        raise ValueError(f"two runs are called {twice!r}, with which ids begin: {remedy}")
    trajectories, skipped = [], Counter[str]()
    for folder in map(Path.resolve, folders):
        try:
            trajectories += _collected(folder, split, f"{prefix}{folder.name}", skipped)
        except (sqlite3.Error, JournalError, msgspec.DecodeError) as error:
            problem = f"{folder / 'journal.sqlite'} is no journal of a run ({error})"
            raise ValueError(f"{problem}: leave it out") from None
    if not trajectories:
        unused = f"no trajectory of split {split!r} could be used"
        raise ValueError(f"{unused}; skipped: {dict(skipped)}")
    return trajectories, skipped


def _collected(
    folder: Path, split: str, name: str, skipped: Counter[str]
) -> Iterator[Trajectory[RecordedStep]]:
    run = judged.process(folder)
    environment = registry.load(run.environment, run.options)
    if not isinstance(environment, SearchQA):
        raise ValueError(f"{folder} is a run of {run.environment!r}: expected one of search_qa")
    usable, _ = load_tasks(run.train if split == "train" else run.heldout)
    tasks = {task.id: task for task in usable}
    first, others = shards.journals(folder)
    with Journal(first, readonly=True, others=others) as journal:
        for row in journal.trees("split=?", split):
            task = tasks.get(row.task)
            if row.status not in ("closed", "replaced"):
                skipped[f"the tree is {row.status}"] += 1
                continue
            if row.removed:
                skipped[f"the tree was {row.reason}"] += 1
                continue
            if task is None:
                skipped["its question is not in the run's task file"] += 1
                continue
            tree = journal.tree(row)
            numbers = {node.trajectory for node in tree.nodes.values() if node.kind == "action"}
            for number in sorted(numbers):
                *before, last = tree.actions(number)
                outcome = last.scores.get("outcome")
                budget = run.scheduler.get("budget", SchedulerConfig().budget)
                turns = [judged.turn(environment, tree, node, task, budget) for node in before]
                if not turns:
                    skipped["it has one turn only: there is nothing to judge"] += 1
                elif outcome is None:
                    skipped["its last turn has no outcome"] += 1
                elif any(turn.observation is None for turn in turns):
                    skipped["a turn has no observation"] += 1
                else:
                    yield Trajectory(
                        id=f"{name}-{tree.id}-{number}", data_source=task.source,
                        question=task.question, golden_answers=task.golds,
                        outcome=1 if outcome >= 1 else 0, evidence=task.evidence,
                        steps=[recorded(turn) for turn in turns],
                    )  # fmt: skip
