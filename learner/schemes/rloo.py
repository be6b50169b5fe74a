"""RLOO: a trajectory's return minus the mean return of the question's other trajectories, A = n /
(n - 1) (R - mean R)."""

import numpy as np

from coppice.common.declared import reads
from coppice.common.statistics import leave_one_out, within
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="task", least=2, aggregation="token")


def advantages(table: TurnTable, column: str = "reward") -> np.ndarray:
    trajectories, returns = table.returns(column)
    return table.per_token(within(trajectories.tree, returns, leave_one_out)[trajectories.of])
