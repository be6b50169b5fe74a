"""Question sets: by path, by hub name, the built-in held-out questions, or the seven of the papers
(methods.md 1.7, 1.8)."""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from coppice.actors.environments.base import RejectedTask, Task
from coppice.actors.environments.task_files import load_tasks, too_few, unusable, with_split
from coppice.tools.evaluating.examination import repeated

HUB = "RUC-NLPIR/FlashRAG_datasets"
PAPER = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The folders of the hub's data set that are the columns of the papers' tables."""
MULTI_HOP = PAPER[3:]
"""The columns of SLATE's ablations (methods.md 1.6, 1.7)."""
HOPS = ("one_hop", "two_hop")
"""The sets of the built-in questions, by the number of hops from 1."""
SPLITS = ("test", "dev", "validation", "train")
"""A set is evaluated on the first of these splits that it has (methods.md 1.8). The hub usually
calls a dev split validation."""


class SetSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column of the table. source: that of the command line, with the split that was chosen.
    rejected: rows of the file that cannot work; reasons: their number by reason. digest: of the
    questions and their gold answers, in order."""

    name: str
    source: str
    questions: int
    rejected: int
    digest: str
    reasons: dict[str, int] = {}


class QuestionSet(msgspec.Struct, frozen=True):
    """The tasks of a column. notes: what the user should know of the file before the
    evaluation."""

    settings: SetSettings
    tasks: list[Task]
    notes: list[str] = []


def read_sets(flags: Sequence[str], count: int | None, seed: int) -> list[QuestionSet]:
    """The sets that --set names, each as its fixed subset of ``count`` questions (None: all).

    flags: NAME=SOURCE texts. "paper" means the papers' seven sets; no text means the built-in
    questions by hops. A source is a .jsonl or .parquet file, a hub data set owner/name[:split], or
    one folder of it, owner/name/folder[:split]. Raises ValueError or FileNotFoundError with the
    remedy.
    """
    specs: list[tuple[str, str]] = []
    for text in flags:
        name, _, source = text.partition("=")
        if text == "paper":
            specs += [(name, f"{HUB}/{name}") for name in PAPER]
        elif not (name and source):
            expected = "NAME=PATH, NAME=owner/name[/folder][:split], or paper"
            raise ValueError(f"--set {text!r}: expected {expected}")
        else:
            specs.append((name, source))
    if twice := repeated([name for name, _ in specs]):
        raise ValueError(f"--set {twice} is given twice: name each set once")
    if specs:
        return [_read(name, source, count, seed) for name, source in specs]
    from coppice.tools.defaults.facts import ensure_facts
    from coppice.tools.defaults.settings import cache_folder  # imports torch

    tasks, rejected = load_tasks(str(ensure_facts(cache_folder()) / "heldout.jsonl"))
    by_hops = {name: [t for t in tasks if t.hops == n] for n, name in enumerate(HOPS, 1)}
    return [
        _set(name, "built-in", subset(own, count, seed), rejected) for name, own in by_hops.items()
    ]


def _read(name: str, source: str, count: int | None, seed: int) -> QuestionSet:
    try:
        source = with_split(source, SPLITS)
        tasks, rejected = load_tasks(source)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--set {name}={source}: {error}") from None
    notes = unusable(name, rejected, len(tasks)) + too_few(name, len(tasks), count or 0)
    return _set(name, source, subset(tasks, count, seed), rejected, notes)


def _set(
    name: str, source: str, tasks: list[Task], rejected: Sequence[RejectedTask],
    notes: Sequence[str] = (),
) -> QuestionSet:  # fmt: skip
    reasons = Counter(re.split("[:,(]", row.reason)[0].strip() for row in rejected)
    rows = [(task.id, task.question, task.golds) for task in tasks]
    digest = hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:16]
    settings = SetSettings(name, source, len(tasks), len(rejected), digest, dict(reasons))
    return QuestionSet(settings, tasks, list(notes))


def subset(tasks: Sequence[Task], count: int | None, seed: int) -> list[Task]:
    """The same ``count`` tasks for the same seed; seed 0 is a run's held-out subset
    (``scheduler.tasks.held_out``)."""
    chosen = list(tasks)
    if count is not None:
        random.Random(seed).shuffle(chosen)
    return chosen[:count]
