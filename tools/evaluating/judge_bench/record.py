"""Trajectories as JSONL records: collected, labelled by two judges, or items of a benchmark
(methods.md 2.5).

A step is a turn that a process judge sees: every turn of a trajectory but the last. ``context`` is
the bare question and, after an empty line, the earlier turns; ``response`` is the turn with its
information block. A PPRM reads nothing else. Judges that read more, such as rules, use ``turn`` and
``evidence``, which a record may lack.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from coppice.common import jsonl
from coppice.common.atomic import write_whole
from coppice.wire.messages import JudgedTurn

THRESHOLD = 0.652
"""A step is good if its score is above this value, the mean step score of the paper's pool (PPR,
A.4)."""
CATEGORIES = ("correct_good", "correct_bad", "wrong_good", "wrong_bad")
"""The outcome, and whether the mean step score is above the threshold."""

Score = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""A judge's score as a share of its maximum, S/M."""


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What is written as a line, or as a part of one."""


class Details(_Record, frozen=True, kw_only=True):
    """Fields of ``wire.messages.JudgedTurn`` under the same names, except that ``summary`` is the
    field ``context``."""

    step: int
    budget: int
    summary: str = ""
    think: str | None = None
    query: str | None = None
    answer: str | None = None
    observation: str | None = None
    past_queries: list[str] = []
    past_observations: list[str] = []


class RecordedStep(_Record, frozen=True, kw_only=True):
    """A turn for a judge."""

    context: str
    response: str
    turn: Details | None = None


class Scored(RecordedStep, frozen=True, kw_only=True):
    """A turn with the scores of two judges. score: their mean, or a reviewer's score."""

    score_a: Score
    score_b: Score
    score: Score


class Labelled(Scored, frozen=True, kw_only=True):
    """A scored turn. target: the two-line judgement to learn, or ""."""

    target: str = ""


class Graded(Scored, frozen=True, kw_only=True):
    """A turn of the benchmark. label: 1 if the score is above the threshold."""

    label: Literal[0, 1]


S = TypeVar("S", bound=RecordedStep)


class Trajectory(_Record, Generic[S], frozen=True, kw_only=True):
    """One trajectory. outcome: exact match of its answer. evidence: the passages that support a
    gold answer, if they are known."""

    id: str
    data_source: str
    question: str
    golden_answers: list[str]
    outcome: Literal[0, 1]
    steps: Annotated[list[S], msgspec.Meta(min_length=1)]
    evidence: list[str] = []


class Item(Trajectory[Graded], frozen=True, kw_only=True):
    """A trajectory of the benchmark."""

    category: Literal["correct_good", "correct_bad", "wrong_good", "wrong_bad"]


R = TypeVar("R", bound=Trajectory[Any])
T = TypeVar("T", bound=msgspec.Struct)


def lines(path: Path, kind: Any, flag: str = "") -> Iterator[tuple[int, Any]]:
    """(line number, value) for each line of a JSONL file. Raises ValueError that names the file,
    and the line if one is wrong."""
    return jsonl.lines(path, kind, f"{_named(kind)} (docs/process-bench.md)", flag)


def read(path: Path, kind: type[R], flag: str = "") -> list[R]:
    """The records of a file. Raises ValueError for a missing file, a bad line, a repeated id, or a
    file without records."""
    by_id: dict[str, R] = {}
    for number, record in lines(path, kind, flag):
        if record.id in by_id:
            twice = f"the id {record.id!r} comes a second time"
            raise ValueError(f"{path}:{number}: {twice}: ids are unique")
        by_id[record.id] = record
    if not by_id:
        expected = f"expected lines of {_named(kind)} (docs/process-bench.md)"
        raise ValueError(f"{path} holds no record: {expected}")
    return list(by_id.values())


def read_all(paths: Sequence[Path], kind: type[R]) -> list[R]:
    """The records of several files. Raises ValueError as ``read`` does, and for an id that is in
    two files."""
    records: list[R] = []
    file_of: dict[str, Path] = {}
    for path in paths:
        of_file = read(path, kind)
        if twice := next((record.id for record in of_file if record.id in file_of), None):
            both = f"the id {twice!r} is in {file_of[twice]} and in {path}"
            again = "collect one of the two runs again with a --prefix (coppice sft collect)"
            raise ValueError(f"{both}: ids are unique: {again}, or leave one file out")
        file_of |= {record.id: path for record in of_file}
        records += of_file
    return records


def write(path: Path, records: Iterable[Any]) -> None:
    """Write records as JSONL. The file appears whole or not at all. Raises OSError that names the
    path."""
    lines = [msgspec.json.encode(record) + b"\n" for record in records]
    try:
        write_whole(path, b"".join(lines), alone=False)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None


def digest(path: Path) -> str:
    """A hex digest of the file's content, which a resumed command compares."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def step_id(record: Trajectory[Any], number: int) -> str:
    """The name of a record's step. number: 1, 2, .."""
    return f"{record.id}#{number}"


def copied(one: msgspec.Struct, kind: type[T], **more: Any) -> T:
    """Return a struct of type ``kind`` with those fields of ``one`` that the type has too, and with
    the fields ``more``."""
    shared = set(one.__struct_fields__) & {field.name for field in msgspec.structs.fields(kind)}
    return kind(**{name: getattr(one, name) for name in shared} | more)


def recorded(turn: JudgedTurn) -> RecordedStep:
    """A judged turn as a step. Question, golds and evidence belong to its trajectory."""
    observation = turn.observation or ""
    details = copied(turn, Details, summary=turn.context)
    context = f"{turn.question}\n\n{turn.transcript}" if turn.transcript else turn.question
    return RecordedStep(context=context, response=turn.response + observation, turn=details)


def judged_turn(record: Trajectory[Any], step: RecordedStep) -> JudgedTurn:
    """The turn that a judge sees. Without ``turn``, it has only the question, transcript, response,
    golds and evidence."""
    question, between, transcript = step.context.partition(f"{record.question}\n\n")
    if question or not between:  # the bare question, or another wording of it
        question, transcript = step.context, ""
    details = step.turn or Details(step=1, budget=1)
    return copied(
        details, JudgedTurn, question=question or record.question, golds=record.golden_answers,
        context=details.summary, response=step.response.removesuffix(details.observation or ""),
        evidence=record.evidence, transcript=transcript,
    )  # fmt: skip


def label(score: float, threshold: float) -> Literal[0, 1]:
    """1 for a good step, whose score is strictly above the threshold, else 0."""
    return 1 if score > threshold else 0


def category(outcome: int, scores: Sequence[float], threshold: float) -> Any:
    """One of ``CATEGORIES``, from the outcome and from the label of the mean step score."""
    good = label(sum(scores) / len(scores), threshold)
    return f"{'correct' if outcome else 'wrong'}_{'good' if good else 'bad'}"


def _named(kind: Any) -> str:
    names = [one.__name__ for one in (kind, *get_args(kind))]
    return names[0] + (f"[{', '.join(names[1:])}]" if names[1:] else "")
