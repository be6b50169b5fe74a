"""OR, VPR's outcome baseline: the return of an episode against all episodes of the batch, on all its turns (methods.md 3.6)."""

import numpy as np

from learner.statistics import standardise
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Positive


def needs(column: str, **_: object) -> SchemeNeeds:
    """The trajectories of the batch."""
    return SchemeNeeds(columns=frozenset({column}), group="batch")


def advantages(table: TurnTable, column: str = "outcome", eps: Positive = 1e-8) -> np.ndarray:
    """float64 [tokens]. Population std; an episode without an outcome has return 0 (a timeout)."""
    trajectories = table.trajectories()
    made = standardise(trajectories.total(table.column(column)), True, 0, eps)
    return table.per_token(made[trajectories.of])
