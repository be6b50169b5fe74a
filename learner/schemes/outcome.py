"""OR, VPR's outcome baseline: an episode's return, compared with all episodes of the batch, on all
its turns (methods.md 3.6)."""

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.learner.update.statistics import Ddof, standardise
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trained import scored

trains = scored("column")


def needs(column: str, **_: object) -> SchemeNeeds:
    return SchemeNeeds(columns=frozenset({column}), group="batch", aggregation="token")


def advantages(table: TurnTable, column: str = "outcome", ddof: Ddof = 0) -> np.ndarray:
    """The environments give an episode that ran out of turns the outcome 0."""
    trajectories = table.trajectories()
    normalised = standardise(trajectories.total(table.column(column)), True, ddof, 1e-8)
    return table.per_token(normalised[trajectories.of])
