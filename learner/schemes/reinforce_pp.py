"""REINFORCE++: the return, minus the mean of its question, whitened over all tokens of the batch (methods.md 4.3).

baseline = "none" is the original without a group (Hu et al. 2025): the return itself, whitened.
"""

from typing import Literal

import numpy as np

from learner.statistics import centre, whiten, within
from learner.table import TurnTable


def advantages(table: TurnTable, column: str = "reward", baseline: Literal["group", "none"] = "group") -> np.ndarray:
    """float64 [tokens]. A missing score adds nothing to the return."""
    trajectories = table.trajectories()
    made = trajectories.total(table.column(column))
    if baseline == "group":
        made = within(trajectories.tree, made, centre)
    return whiten(table.per_token(made[trajectories.of]), table.mask())
