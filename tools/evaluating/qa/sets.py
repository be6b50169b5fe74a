"""Question sets: by path, by hub name, the built-in held-out questions, or the seven of the papers (methods.md 1.7, 1.8)."""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.environments.base import Rejected, Task
from actors.environments.hub import chosen
from actors.environments.task_files import load_tasks

HUB = "RUC-NLPIR/FlashRAG_datasets"
PAPER = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The folders of the hub's data set that the papers' tables have as columns."""
MULTI_HOP = PAPER[3:]
"""The columns of SLATE's ablations (methods.md 1.6, 1.7)."""
SPLITS = ("test", "dev", "validation", "train")
"""The first of these that a set has is the one to evaluate on (methods.md 1.8); validation is the hub's usual name of a dev split."""


class QuestionSet(msgspec.Struct, frozen=True):
    """A column of the table. source: where it was asked for, with the split that was chosen.

    rejected: how many rows of the file cannot work, by reason.
    """

    name: str
    source: str
    tasks: list[Task]
    rejected: dict[str, int]

    @property
    def digest(self) -> str:
        """Hex digest of the questions and their golds, in order."""
        rows = [(task.id, task.question, task.golds) for task in self.tasks]
        return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:16]


def read_sets(given: Sequence[str], count: int | None, seed: int, heldout: Path | None = None) -> list[QuestionSet]:
    """The sets of --set NAME=SOURCE texts, each its fixed subset of ``count`` questions (None: all).

    given: "paper" stands for the seven sets; none at all for the built-in questions by hops, which are read from ``heldout``. A source is a
    .jsonl or .parquet file, a hub data set owner/name[:split], or a folder of one, owner/name/folder[:split].
    Raises ValueError or FileNotFoundError with the remedy.
    """
    specs: list[tuple[str, str]] = []
    for text in given:
        name, equals, source = text.partition("=")
        if text == "paper":
            specs += [(name, f"{HUB}/{name}") for name in PAPER]
        elif not (equals and name and source):
            raise ValueError(f"--set {text!r}: expected NAME=PATH, NAME=owner/name[/folder][:split], or paper")
        else:
            specs.append((name, source))
    names = [name for name, _ in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--set {twice[0]} is given twice: name each set once")
    if not specs:
        assert heldout is not None, "the built-in questions were not made"
        return _by_hops(heldout, count, seed)
    return [_read(name, source, count, seed) for name, source in specs]


def _by_hops(path: Path, count: int | None, seed: int) -> list[QuestionSet]:
    tasks, rejected = load_tasks(str(path))
    words = {1: "one_hop", 2: "two_hop"}
    return [
        QuestionSet(
            words[hops], "built-in", subset([t for t in tasks if t.hops == hops], count, seed), _counted(rejected)
        )
        for hops in sorted(words)
    ]


def _read(name: str, source: str, count: int | None, seed: int) -> QuestionSet:
    try:
        source = chosen(source, SPLITS)
        tasks, rejected = load_tasks(source)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--set {name}={source}: {error}") from None
    return QuestionSet(name, source, subset(tasks, count, seed), _counted(rejected))


def _counted(rejected: Sequence[Rejected]) -> dict[str, int]:
    """By the words of a reason before its details."""
    return dict(Counter(re.split("[:,(]", row.reason)[0].strip() for row in rejected))


def subset(tasks: Sequence[Task], count: int | None, seed: int) -> list[Task]:
    """The same ``count`` tasks for the same seed; seed 0 is a run's held-out subset (``scheduler.tasks.held_out``)."""
    if count is None:
        return list(tasks)
    shuffled = list(tasks)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]
