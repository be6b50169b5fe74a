"""Labels of two judges. Steps on which the judges differ too much are dropped; a reviewer sees the
others (methods.md 2.5; PPR, A.4)."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from coppice.tools.evaluating.judge_bench.judging import Answers, Asked
from coppice.tools.evaluating.judge_bench.record import Labelled, Step, Trajectory, copied, step_id
from coppice.tools.finetuning.judge.judgement import two_lines

MOST_DIFFERENCE = 0.4
"""Two scores that differ by more than this are an anomaly (PPR, A.4)."""
_ROUNDING = 1e-9


class Settings(msgspec.Struct, frozen=True):
    """The settings that must not change when an interrupted labelling goes on."""

    trajectories: str
    judges: list[Asked]


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


def labelled(
    trajectories: Sequence[Trajectory[Step]],
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
    kept = []
    for record in trajectories:
        steps = []
        for number, step in enumerate(record.steps, 1):
            name = step_id(record, number)
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
                mean = (one.score + two.score) / 2
                steps.append(
                    copied(
                        step,
                        Labelled,
                        score_a=one.score,
                        score_b=two.score,
                        score=mean,
                        target=target,
                    )
                )
        if steps:
            kept.append(copied(record, Trajectory[Labelled], steps=steps))
        else:
            counts["trajectories without a step left"] += 1
    return kept, +counts


def to_review(records: Sequence[Trajectory[Labelled]]) -> list[Review]:
    """Return one line per step for a person to edit."""
    return [
        Review(
            step_id(r, n),
            r.question,
            r.golden_answers,
            s.context,
            s.response,
            s.score_a,
            s.score_b,
            s.target,
        )
        for r in records
        for n, s in enumerate(r.steps, 1)
    ]
