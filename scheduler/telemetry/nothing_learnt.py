"""How a run tells that it learns nothing: the conditions with their remedies, and the compared
groups whose rewards are equal.

This module is pure. The warnings go to the terminal through ``scheduler.terminal.Reminders``.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from coppice.common.declared import Equal
from coppice.scheduler.growth.dynamic_sampling import differs
from coppice.wire.messages import Turn

UPDATES = 3
"""The number of updates in a row after which a condition is told that may be chance in one update.
"""
LATEST_STEP = 8
"""Groups of this step and of later ones are counted together."""
COMPARED, EQUAL = "compared_step_", "equal_step_"
COUNTS = [f"{name}{step}" for name in (COMPARED, EQUAL) for step in range(1, LATEST_STEP + 1)]
"""Counts by step: groups of two scored trajectories or more, and those of them whose rewards are
equal."""
NO_EVIDENCE = "tasks/without_evidence"
"""Not a metric, but a value that ``Fruitless`` adds to each record."""


def counted(turns: Sequence[Turn], column: str, equal: Equal) -> Counter[str]:
    """Count one emitted group, as ``COUNTS`` says. A group's step is that of its first turn.
    column, equal: what ``dynamic_sampling.differs`` compares. A group of which fewer than two
    trajectories have the column is not counted: there is nothing to compare."""
    if len({turn.trajectory for turn in turns if column in turn.scores}) < 2:
        return Counter()
    step = min(LATEST_STEP, min(turn.turn for turn in turns))
    return Counter(
        {f"{COMPARED}{step}": 1, f"{EQUAL}{step}": int(not differs([turns], column, equal))}
    )


def summary(counts: Mapping[str, int]) -> str:
    """Return the line of the closing summary, or "" if no group was compared."""
    steps = [step for step in range(1, LATEST_STEP + 1) if counts.get(f"{COMPARED}{step}")]
    if not steps:
        return ""
    each = ", ".join(
        f"step {step}: {counts.get(f'{EQUAL}{step}', 0)} of {counts[f'{COMPARED}{step}']}"
        for step in steps
    )
    equal, compared = (
        sum(counts.get(f"{name}{step}", 0) for step in steps) for name in (EQUAL, COMPARED)
    )
    later = f" (step {LATEST_STEP}: or later)" if LATEST_STEP in steps else ""
    return f"groups whose rewards are all equal, which teach nothing: {equal} of {compared} ({equal / compared:.0%}); {each}{later}"


class Condition(msgspec.Struct, frozen=True):
    """holds: whether an update's record shows it. after: told when it has held in so many updates
    in a row. said: cause and remedy; {column} is the column of rewards that the scheme reads."""

    holds: Callable[[Mapping[str, float]], bool]
    after: int
    said: str


CONDITIONS = (
    Condition(
        lambda record: (
            record.get("learner/left_out_trajectories", 0) > 0 and not record.get("learner/turns")
        ),
        1,
        "nothing is learnt: the scheme left out every trajectory, because the column that it reads ({column!r}) is missing on"
        " turns of each. See with coppice trees which columns the last turns have, and set learner.scheme_options to one of them",
    ),
    Condition(
        lambda record: bool(record.get(NO_EVIDENCE)),
        1,
        "the judge of queries reads supporting passages and no task has any (the field evidence), so every new query scores 0: give"
        " the tasks evidence, or set judges.use.slate_rules.query = 'format'",
    ),
    Condition(
        lambda record: record.get("score/valid", 1.0) == 0,
        UPDATES,
        f"no action was valid in the last {UPDATES} updates: the policy does not write the environment's notation. Look at its"
        " actions with coppice trees, and begin with a model that was fine-tuned to it (coppice sft)",
    ),
    Condition(
        lambda record: record.get("learner/zero_advantage_share", 0.0) == 1,
        UPDATES,
        f"nothing is learnt: every advantage was 0 in the last {UPDATES} updates, because the trajectories that are compared"
        " earned the same ({column!r}). Choose harder or easier tasks, more candidates or a higher scheduler.temperature, or set"
        " scheduler.dynamic_sampling_budget",
    ),
)


class Fruitless:
    """Counts for how many updates in a row each condition has held. column: of the rewards, for the
    sentences. unsupported: whether the judge reads supporting passages and no task has any."""

    def __init__(self, column: str, unsupported: bool = False):
        self._column, self._known = column, {NO_EVIDENCE: float(unsupported)}
        self._held = [0] * len(CONDITIONS)

    def note(self, record: Mapping[str, float]) -> list[str]:
        """Return the warnings that hold after one more update."""
        record = {**record, **self._known}
        self._held = [
            held + 1 if c.holds(record) else 0
            for held, c in zip(self._held, CONDITIONS, strict=True)
        ]
        told = [c for held, c in zip(self._held, CONDITIONS, strict=True) if held >= c.after]
        return [condition.said.format(column=self._column) for condition in told]
