"""Question sets: by path, by hub name, the built-in held-out questions, or the seven of the papers (methods.md 1.7, 1.8)."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.environments.base import Task
from actors.environments.task_files import hub_splits, load_tasks

HUB = "RUC-NLPIR/FlashRAG_datasets"
PAPER = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The folders of the hub's data set that the papers' tables have as columns."""
MULTI_HOP = PAPER[3:]
"""The columns of SLATE's ablations (methods.md 1.6, 1.7)."""
SPLITS = ("test", "dev", "train")
"""The first of these that a set has is the one to evaluate on (methods.md 1.8)."""
_PLAIN_SPLITS = ("test", "dev", "validation", "train")
"""The same where a dev split may have the hub's usual name."""


class QuestionSet(msgspec.Struct, frozen=True):
    """A column of the table. source: where it was asked for, with the split that was chosen; rejected: rows of the file that cannot work."""

    name: str
    source: str
    tasks: list[Task]
    rejected: int

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
        QuestionSet(words[hops], "built-in", subset([t for t in tasks if t.hops == hops], count, seed), len(rejected))
        for hops in sorted(words)
    ]


def _read(name: str, source: str, count: int | None, seed: int) -> QuestionSet:
    try:
        if there := hub_splits(source):
            source = f"{source}:{_first(there)}"
        tasks, rejected = load_tasks(_file(source))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--set {name}={source}: {error}") from None
    return QuestionSet(name, source, subset(tasks, count, seed), len(rejected))


def _first(there: Sequence[str]) -> str:
    for split in _PLAIN_SPLITS:
        if split in there:
            return split
    raise ValueError(
        f"it has the splits {sorted(there)}, none of {', '.join(_PLAIN_SPLITS)}: name one, owner/name:split"
    )


def subset(tasks: Sequence[Task], count: int | None, seed: int) -> list[Task]:
    """The same ``count`` tasks for the same seed; seed 0 is a run's held-out subset (``scheduler.tasks.held_out``)."""
    if count is None:
        return list(tasks)
    shuffled = list(tasks)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]


def _file(source: str) -> str:
    """A folder of a hub data set as a file of this machine; anything else as it is."""
    owner, _, rest = source.partition("/")
    name, _, folder = rest.partition("/")
    if Path(source).exists() or not folder or "/" in folder or source.startswith((".", "/")) or "." in folder:
        return source
    folder, _, split = folder.partition(":")
    return _from_hub(f"{owner}/{name}", folder, (split,) if split else SPLITS)


def _from_hub(repository: str, folder: str, splits: Sequence[str]) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for split in splits:
        try:
            return hf_hub_download(repository, f"{folder}/{split}.jsonl", repo_type="dataset")
        except LocalEntryNotFoundError:  # no network: another split must not stand in for this one
            raise FileNotFoundError(
                f"the hub cannot be reached and {folder}/{split}.jsonl is not in its cache: give a path instead"
            ) from None
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise FileNotFoundError(f"the hub did not give {repository}: {reason}; give a path instead") from None
    raise FileNotFoundError(
        f"{repository} has no {folder}/{' or '.join(splits)}.jsonl: give a path, or owner/name/folder:split"
    )
