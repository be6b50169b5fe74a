"""Trajectories as JSONL records: collected, or labelled by two judges (methods.md 2.5).

A step is a turn that a process judge sees: every turn of a trajectory but the last. ``context`` is
the bare question and, after an empty line, the earlier turns; ``response`` is the turn with its
information block. A PPRM reads nothing else. Judges that read more, such as rules, use ``turn`` and
``evidence``, which a record may lack.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from coppice.common import jsonl
from coppice.common.atomic import write_whole
from coppice.wire.messages import JudgedTurn

THRESHOLD = 0.652
"""A step is good if its score is above this value, the mean step score of the paper's pool (PPR,
A.4)."""
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


class Labelled(RecordedStep, frozen=True, kw_only=True):
    """A turn with the scores of two judges. score: their mean. target: the two-line judgement to
    learn, or ""."""

    score_a: Score
    score_b: Score
    score: Score
    target: str = ""


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


R = TypeVar("R", bound=Trajectory[Any])
T = TypeVar("T", bound=msgspec.Struct)


def read(paths: Sequence[Path], kind: type[R], flag: str = "") -> list[R]:
    """The records of files. Raises ValueError for a missing file, a bad line, a repeated id, or a
    file without records."""
    found: dict[str, tuple[R, Path]] = {}
    for path in paths:
        before, expected = len(found), "trajectories (docs/sft.md, docs/process-bench.md)"
        for number, record in jsonl.lines(path, kind, expected, flag):
            if other := found.get(record.id):
                twice = f"the id {record.id!r} comes a second time, it is in {other[1]}"
                remedy = "collect one run again with a --prefix (coppice sft collect)"
                raise ValueError(f"{path}:{number}: {twice}; {remedy}, or leave one out")
            found[record.id] = record, path
        if len(found) == before:
            raise ValueError(f"{path} holds no record: expected lines of {expected}")
    return [record for record, _ in found.values()]


def write(path: Path, records: Iterable[Any]) -> None:
    """Write records as JSONL. The file appears whole or not at all. Raises OSError that names the
    path."""
    try:
        write_whole(path, b"".join(msgspec.json.encode(one) + b"\n" for one in records), False)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None


def named_steps(records: Sequence[R]) -> list[tuple[str, R, Any]]:
    """Every step after its name, id#1, id#2, .., and its record."""
    return [(f"{one.id}#{n}", one, step) for one in records for n, step in enumerate(one.steps, 1)]


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


def label(score: float, threshold: float = THRESHOLD) -> Literal[0, 1]:
    """1 for a good step, whose score is strictly above the threshold, else 0."""
    return 1 if score > threshold else 0
