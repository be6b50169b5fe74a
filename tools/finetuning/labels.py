"""From the labels of two judges to training rows of a PPRM: steps on which the judges differ too
much are dropped (methods.md 2.2, 2.5; PPR, A.4)."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from coppice.judges.pprm import messages, parse_final_score, read_templates
from coppice.tools.finetuning import records
from coppice.tools.finetuning.judging import Answers, JudgeSpec
from coppice.tools.finetuning.records import Labelled, RecordedStep, Trajectory, copied, named_steps

MOST_DIFFERENCE = 0.4
"""Two scores that differ by more than this are an anomaly (PPR, A.4)."""
_ROUNDING = 1e-9
_SCORES = re.compile(r"(?:Scores:)?\s*<final_score>.*", re.DOTALL)


class LabelSettings(msgspec.Struct, frozen=True):
    """The settings that must not change when an interrupted labelling goes on."""

    trajectories: str
    judges: list[JudgeSpec]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class TrainingRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line that ``coppice sft train`` reads. prompt: instead of messages. group: the question;
    all rows of a group are held out together. rendered: the prompt is in the chat format."""

    completion: str
    prompt: str = ""
    messages: tuple[ChatMessage, ...] = ()
    group: str = ""
    rendered: bool = False


def two_lines(text: str) -> str:
    """Return a judgement in exactly the two lines that a PPRM learns to write, "Analysis: .." and
    "Scores: <final_score>S,M</final_score>"; "" if it holds no analysis or no readable score."""
    score = parse_final_score(text)
    analysis = " ".join(_SCORES.sub("", text).replace("Analysis:", "", 1).split())
    if score is None or not analysis:
        return ""
    return f"Analysis: {analysis}\nScores: <final_score>{score[0]},{score[1]}</final_score>"


def labelled(
    trajectories: Sequence[Trajectory[RecordedStep]], answers: Answers, most_difference: float
) -> tuple[list[Trajectory[Labelled]], Counter[str]]:
    """Return the trajectories with their remaining steps, and the counts of steps by what became of
    them. answers: of the judges "a" and "b".

    The target is the judgement of judge a, or else of judge b, because one judge's analysis and
    score agree; "" if neither wrote one.
    """
    kept, counts = dict[str, list[Labelled]](), Counter[str]()
    for name, record, step in named_steps(trajectories):
        of_record = kept.setdefault(record.id, [])
        one, two = (answers.found.get((judge, name)) for judge in "ab")
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
            of_record.append(copied(step, Labelled, **scores, score=mean, target=target))
    counts["trajectories without a step left"] += sum(not steps for steps in kept.values())
    made = [copied(one, Trajectory[Labelled], steps=kept[one.id]) for one in trajectories]
    return [one for one in made if one.steps], +counts


def judgement_rows(
    labelled: Sequence[Trajectory[Labelled]], most: int = 0, seed: int = 0, balance: bool = False
) -> tuple[list[TrainingRow], Counter[str]]:
    """Return the distinct rows of the steps that have a target, and the counts of steps left out by
    reason. A row is the chat that asks for a judgement (judges/pprm.py) and the answer.

    most: the size of a random part to return, 0 for all rows. balance: return as many good as bad
    targets, because a model that sees mostly one kind learns to give one score.
    """
    texts = read_templates()
    good: dict[TrainingRow, bool] = {}
    left_out = Counter[str]()
    for _, one, step in named_steps(labelled):
        chat = messages(records.judged_turn(one, step), texts)
        conversation = msgspec.convert(chat, tuple[ChatMessage, ...])
        row = TrainingRow(step.target, messages=conversation, group=one.question)
        if not step.target:
            left_out["without a judgement to learn"] += 1
        elif row in good:
            left_out["the same as another"] += 1
        else:
            pair = parse_final_score(step.target)
            good[row] = bool(records.label(pair[0] / pair[1] if pair else step.score))
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
