"""OR, VPR's outcome baseline: an episode's return, compared with all episodes of the batch, on all its turns (methods.md 3.6)."""

import numpy as np

from learner.statistics import standardise
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Positive


def needs(column: str, **_: object) -> SchemeNeeds:
    """The scheme compares all trajectories of the batch."""
    return SchemeNeeds(columns=frozenset({column}), group="batch")


def advantages(table: TurnTable, column: str = "outcome", eps: Positive = 1e-8) -> np.ndarray:
    """Return float64 [tokens]. The std is the population's. An episode without an outcome (a timeout) has return 0."""
    trajectories = table.trajectories()
    normalised = standardise(trajectories.total(table.column(column)), True, 0, eps)
    return table.per_token(normalised[trajectories.of])
