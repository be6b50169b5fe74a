"""Applies a reviewer's corrections strictly: a correction other than "S,M", "drop" or "" is refused
with its line."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coppice.tools.evaluating.judge_bench.record import Labelled, Trajectory, lines, step_id
from coppice.tools.finetuning.judge.judgement import parse_correction, two_lines
from coppice.tools.finetuning.judge.label import Review

Correction = tuple[int, int] | None
"""S and M, or None to drop the step."""
_SHOWN = [key for key in Review.__struct_fields__ if key != "correction"]


def read_corrections(path: Path, written: Sequence[Review]) -> dict[str, Correction]:
    """Return the non-empty corrections by step. written: the lines as they were before the review.

    Raises ValueError naming the line of an unknown id, of an edit outside the correction, or of an
    unusable correction.
    """
    known = {row.id: row for row in written}
    corrections: dict[str, Correction] = {}
    seen: set[str] = set()
    for number, row in lines(path, Review):
        if row.id not in known:
            raise ValueError(
                f"{path}:{number}: no step {row.id!r} in the labelled file: expected ids as coppice sft label wrote them"
            )
        if changed := [key for key in _SHOWN if getattr(row, key) != getattr(known[row.id], key)]:
            raise ValueError(
                f"{path}:{number}: {changed[0]} of {row.id!r} was edited, which has no effect: edit the correction alone"
            )
        if row.id in seen:
            raise ValueError(f"{path}:{number}: the step {row.id!r} comes a second time")
        seen.add(row.id)
        text = row.correction.strip()
        pair = parse_correction(text)
        if text and text != "drop" and pair is None:
            raise ValueError(
                f'{path}:{number}: correction {row.correction!r}: expected "S,M" (whole numbers, 0 <= S <= M, M > 0), "drop" or ""'
            )
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
    kept, counts = [], Counter[str]()
    for record in records:
        steps = []
        for number, step in enumerate(record.steps, 1):
            name = step_id(record, number)
            if name not in corrections:
                counts["kept"] += 1
                steps.append(step)
            elif (pair := corrections[name]) is None:
                counts["dropped"] += 1
            else:
                counts["corrected"] += 1
                target = two_lines(step.target, pair) if step.target else ""
                steps.append(msgspec.structs.replace(step, score=pair[0] / pair[1], target=target))
        if steps:
            kept.append(msgspec.structs.replace(record, steps=steps))
        else:
            counts["trajectories without a step left"] += 1
    return kept, counts
