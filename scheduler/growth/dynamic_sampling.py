"""Groups whose trajectories all earn the same teach nothing: count them, and replace their question
(DAPO, Yu et al. 2025, section 3.2). A replaced tree gives its admission back (ledger/pacing.py) and
counts as no question of an update; its groups enter the next frontier without loss."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from coppice.common.declared import Equal
from coppice.wire.messages import Turn

LATEST_STEP = 8
"""Groups of this step and of later ones are counted together."""
COMPARED, EQUAL = "compared_step_", "equal_step_"
COUNTS = [f"{name}{step}" for name in (COMPARED, EQUAL) for step in range(1, LATEST_STEP + 1)]
"""Counts by step: groups of two scored trajectories or more, and those with equal rewards."""


def differs(
    groups: Iterable[Sequence[Turn]], column: str, equal: Equal, across: bool = False
) -> bool:
    """Whether the trajectories of any group, or ``across`` all groups, differ in the scores of
    ``column``: in their sums over the turns ("returns"), or turn by turn ("turns"). One without any
    score is left out, and one without a sum, as the learner makes it (``Trajectories.total``)."""
    found = set[tuple[float, ...]]()
    for group in groups:
        trajectories: dict[int, list[Turn]] = {}
        for turn in group:
            trajectories.setdefault(turn.trajectory, []).append(turn)
        several, own = trajectories.values(), set[tuple[float, ...]]()
        whole = equal == "returns" and any(column in t.scores for s in several for t in s[:-1])
        for turns in several:
            given = [turn.scores[column] for turn in turns if column in turn.scores]
            if equal == "turns" and given:  # no score counts 0, and zeros at the end change nothing
                rewards = [turn.scores.get(column, 0.0) for turn in turns]
                while rewards and not rewards[-1]:
                    rewards.pop()
                own.add(tuple(rewards))
            elif given and (len(given) == len(turns) or not whole):
                own.add((math.fsum(given),))
        found = found | own if across else own
        if len(found) > 1:
            return True
    return False


def counted(turns: Sequence[Turn], column: str, equal: Equal) -> Counter[str]:
    """Count one group by its first turn's step, if two of its trajectories have the column."""
    if len({turn.trajectory for turn in turns if column in turn.scores}) < 2:
        return Counter()
    step = min(LATEST_STEP, min(turn.turn for turn in turns))
    alike = not differs([turns], column, equal)
    return Counter({f"{COMPARED}{step}": 1, f"{EQUAL}{step}": int(alike)})
