"""From the labels of two judges to training rows of a PPRM: steps on which the judges differ too
much are dropped, a reviewer corrects the others (methods.md 2.2, 2.5; PPR, A.4)."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from coppice.judges.pprm import messages, parse_final_score, read_templates
from coppice.tools.evaluating.judge_bench import record
from coppice.tools.evaluating.judge_bench.judging import Answers, JudgeSpec
from coppice.tools.evaluating.judge_bench.record import Labelled, RecordedStep, Trajectory, copied

MOST_DIFFERENCE = 0.4
"""Two scores that differ by more than this are an anomaly (PPR, A.4)."""
_ROUNDING = 1e-9
_SCORES = re.compile(r"(?:Scores:)?\s*<final_score>.*", re.DOTALL)


class LabelSettings(msgspec.Struct, frozen=True):
    """The settings that must not change when an interrupted labelling goes on."""

    trajectories: str
    judges: list[JudgeSpec]


class Review(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step as a reviewer sees it. correction: "S,M" replaces the score, "drop" removes the step,
    "" keeps the step."""

    id: str
    question: str
    golden_answers: list[str]
    context: str
    response: str
    score_a: float
    score_b: float
    target: str
    correction: str = ""


Correction = tuple[int, int] | None
"""S and M, or None to drop the step."""
_SHOWN = [key for key in Review.__struct_fields__ if key != "correction"]


class Message(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: str
    content: str


class JudgementRow(msgspec.Struct, frozen=True):
    """A line that ``coppice sft train`` reads. group: the question; all rows of a question are held
    out together."""

    messages: tuple[Message, ...]
    completion: str
    group: str = ""


def two_lines(text: str, pair: tuple[int, int] | None = None) -> str:
    """Return a judgement in exactly the two lines that a PPRM learns to write, "Analysis: .." and
    "Scores: <final_score>S,M</final_score>", with ``pair`` as its score if given; "" if it holds no
    analysis or no readable score."""
    score = pair or parse_final_score(text)
    analysis = " ".join(_SCORES.sub("", text).replace("Analysis:", "", 1).split())
    if score is None or not analysis:
        return ""
    return f"Analysis: {analysis}\nScores: <final_score>{score[0]},{score[1]}</final_score>"


# ----------------------------------------------------------------------------------------------
# labels


def labelled(
    trajectories: Sequence[Trajectory[RecordedStep]],
    answers: Answers,
    a: str,
    b: str,
    most_difference: float = MOST_DIFFERENCE,
) -> tuple[list[Trajectory[Labelled]], Counter[str]]:
    """Return the trajectories with their remaining steps, and the counts of steps by what became of
    them.

    The target is the judgement of judge a, or else of judge b, because one judge's analysis and
    score agree; "" if neither wrote one.
    """
    counts = Counter[str]()

    def label(name: str, step: RecordedStep) -> Labelled | None:
        one, two = (answers.found.get((judge, name)) for judge in (a, b))
        if one is None or two is None:
            counts["not judged"] += 1
        elif one.score is None or two.score is None:
            counts["output that cannot be read"] += 1
        elif abs(one.score - two.score) > most_difference + _ROUNDING:
            counts[f"scores differ by more than {most_difference:g}"] += 1
        else:
            counts["labelled"] += 1
            target = two_lines(one.text) or two_lines(two.text)
            counts["labelled, without a judgement to learn"] += not target
            scores = {"score_a": one.score, "score_b": two.score}
            mean = (one.score + two.score) / 2
            return copied(step, Labelled, **scores, score=mean, target=target)
        return None

    return _each_step(trajectories, label, counts), +counts


def _each_step(
    records: Sequence[Trajectory],
    change: Callable[[str, RecordedStep], Labelled | None],
    counts: Counter[str],
) -> list[Trajectory[Labelled]]:
    """Change every step, or drop it for None. Count and leave out trajectories without steps."""
    kept = []
    for one in records:
        steps = [change(record.step_id(one, n), step) for n, step in enumerate(one.steps, 1)]
        if left := [step for step in steps if step is not None]:
            kept.append(copied(one, Trajectory[Labelled], steps=left))
        else:
            counts["trajectories without a step left"] += 1
    return kept


# ----------------------------------------------------------------------------------------------
# the review


def to_review(records: Sequence[Trajectory[Labelled]]) -> list[Review]:
    """Return one line per step for a person to edit."""
    return [
        copied(
            step, Review, id=record.step_id(one, number), question=one.question,
            golden_answers=one.golden_answers,
        )
        for one in records
        for number, step in enumerate(one.steps, 1)
    ]  # fmt: skip


def read_corrections(path: Path, written: Sequence[Review]) -> dict[str, Correction]:
    """Return the non-empty corrections by step. written: the lines as they were before the review.

    Raises ValueError naming the line of an unknown id, of an edit outside the correction, or of an
    unusable correction.
    """
    by_id = {row.id: row for row in written}
    corrections: dict[str, Correction] = {}
    seen: set[str] = set()
    for number, row in record.lines(path, Review):
        place, text = f"{path}:{number}:", row.correction.strip()
        pair = parse_final_score(f"<final_score>{text}</final_score>") if "<" not in text else None
        if row.id not in by_id:
            expected = "expected ids as coppice sft label wrote them"
            raise ValueError(f"{place} no step {row.id!r} in the labelled file: {expected}")
        if changed := [key for key in _SHOWN if getattr(row, key) != getattr(by_id[row.id], key)]:
            useless = f"{changed[0]} of {row.id!r} was edited, which has no effect"
            raise ValueError(f"{place} {useless}: edit the correction alone")
        if row.id in seen:
            raise ValueError(f"{place} the step {row.id!r} comes a second time")
        if text and text != "drop" and pair is None:
            expected = 'expected "S,M" (whole numbers, 0 <= S <= M, M > 0), "drop" or ""'
            raise ValueError(f"{place} correction {row.correction!r}: {expected}")
        seen.add(row.id)
        if text:
            corrections[row.id] = pair
    return corrections


def corrected(
    records: Sequence[Trajectory[Labelled]], corrections: dict[str, Correction]
) -> tuple[list[Trajectory[Labelled]], Counter[str]]:
    """Return the records after the review, and the counts of steps kept, corrected and dropped.

    A corrected step gets the reviewer's score, in which its target also ends; the analysis stays as
    the judge wrote it.
    """
    counts = Counter[str]()

    def correct(name: str, step: Labelled) -> Labelled | None:
        if name not in corrections:
            counts["kept"] += 1
            return step
        if (pair := corrections[name]) is None:
            counts["dropped"] += 1
            return None
        counts["corrected"] += 1
        target = two_lines(step.target, pair) if step.target else ""
        return msgspec.structs.replace(step, score=pair[0] / pair[1], target=target)

    return _each_step(records, correct, counts), counts  # pyright: ignore[reportArgumentType]


# ----------------------------------------------------------------------------------------------
# training rows


def judgement_rows(
    records: Sequence[Trajectory[Labelled]], most: int = 0, seed: int = 0, balance: bool = False
) -> tuple[list[JudgementRow], Counter[str]]:
    """Return the distinct rows of the steps that have a target, and the counts of steps left out by
    reason. A row is the chat that asks for a judgement (judges/pprm.py) and the answer.

    most: the size of a random part to return, 0 for all rows. balance: return as many good as bad
    targets, because a model that sees mostly one kind learns to give one score.
    """
    texts = read_templates()
    good: dict[JudgementRow, bool] = {}
    left_out = Counter[str]()
    for one in records:
        for step in one.steps:
            chat = messages(record.judged_turn(one, step), texts)
            row = JudgementRow(
                tuple(Message(**message) for message in chat), step.target, one.question
            )
            if not step.target:
                left_out["without a judgement to learn"] += 1
            elif row in good:
                left_out["the same as another"] += 1
            else:
                pair = parse_final_score(step.target)
                score = pair[0] / pair[1] if pair else step.score
                good[row] = bool(record.label(score, record.THRESHOLD))
    kinds = [[row for row, kind in good.items() if kind == wanted] for wanted in (True, False)]
    for rows in kinds:
        random.Random(seed).shuffle(rows)
    if balance:
        kinds = [rows[: min(map(len, kinds))] for rows in kinds]
        left_out["more than the other kind"] += len(good) - sum(map(len, kinds))
    chosen = [row for rows in kinds for row in rows]
    random.Random(seed).shuffle(chosen)
    if most and len(chosen) > most:
        left_out["more than asked for"] += len(chosen) - most
        chosen = chosen[:most]
    return chosen, +left_out
