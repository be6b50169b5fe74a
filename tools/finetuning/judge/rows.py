"""Training rows of a PPRM: the chat that asks for a judgement (judges/pprm.py) and the answer of
two lines."""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from coppice.judges.pprm import messages, parse_final_score, read_templates
from coppice.tools.evaluating.judge_bench.record import (
    THRESHOLD,
    Labelled,
    Trajectory,
    judged_turn,
    label,
)


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


def judgement_rows(
    records: Sequence[Trajectory[Labelled]], most: int = 0, seed: int = 0, balance: bool = False
) -> tuple[list[JudgementRow], Counter[str]]:
    """Return the distinct rows of the steps that have a target, and the counts of steps left out by
    reason.

    most: the size of a random part to return, 0 for all rows. balance: return as many good as bad
    targets, because a model that sees mostly one kind learns to give one score.
    """
    texts = read_templates()
    good: dict[JudgementRow, bool] = {}
    left_out = Counter[str]()
    for record in records:
        for step in record.steps:
            chat = messages(judged_turn(record, step), texts)
            row = JudgementRow(
                tuple(Message(**message) for message in chat), step.target, record.question
            )
            if not step.target:
                left_out["without a judgement to learn"] += 1
            elif row in good:
                left_out["the same as another"] += 1
            else:
                pair = parse_final_score(step.target)
                good[row] = bool(label(pair[0] / pair[1] if pair else step.score, THRESHOLD))
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
