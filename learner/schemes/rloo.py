"""RLOO: the return of a trajectory minus the mean return of the others of its question, A = n / (n - 1) (R - mean R)."""

import numpy as np

from learner.statistics import leave_one_out, within
from learner.table import TurnTable
from wire.declared import SchemeNeeds


def needs(column: str, **_: object) -> SchemeNeeds:
    """Whole trajectories of one task, two at least."""
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2)


def advantages(table: TurnTable, column: str = "reward") -> np.ndarray:
    """float64 [tokens]. A missing score adds nothing to the return."""
    trajectories = table.trajectories()
    made = within(trajectories.tree, trajectories.total(table.column(column)), leave_one_out)
    return table.per_token(made[trajectories.of])
