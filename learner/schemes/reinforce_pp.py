"""REINFORCE++: the return, minus the mean of its question, whitened over all tokens of the batch (methods.md 4.3).

baseline = "none" is the original without a group (Hu et al. 2025): the return itself, whitened.
"""

from typing import Literal

import numpy as np

from learner.statistics import centre, whiten, within
from learner.table import TurnTable
from wire.declared import SchemeNeeds


def needs(column: str, baseline: str, **_: object) -> SchemeNeeds:
    """Trajectories of one task where the mean of the task is the baseline, else of the batch."""
    grouped = baseline == "group"
    return SchemeNeeds(columns=frozenset({column}), group="task" if grouped else "batch", least=2 if grouped else 1)


def advantages(table: TurnTable, column: str = "reward", baseline: Literal["group", "none"] = "group") -> np.ndarray:
    """float64 [tokens]. A missing score adds nothing to the return."""
    trajectories = table.trajectories()
    made = trajectories.total(table.column(column))
    if baseline == "group":
        made = within(trajectories.tree, made, centre)
    return whiten(table.per_token(made[trajectories.of]), table.mask())
