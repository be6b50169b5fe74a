"""RLOO: a trajectory's return minus the mean return of the question's other trajectories, A = n /
(n - 1) (R - mean R)."""

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.learner.update.statistics import leave_one_out, within
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trained import scored

trains = scored("column")


def needs(column: str, **_: object) -> SchemeNeeds:
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2, aggregation="token")


def advantages(table: TurnTable, column: str = "reward") -> np.ndarray:
    trajectories = table.trajectories()
    centred = within(trajectories.tree, trajectories.total(table.column(column)), leave_one_out)
    return table.per_token(centred[trajectories.of])
