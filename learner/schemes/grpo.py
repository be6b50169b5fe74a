"""GRPO: the return of a trajectory, compared with the trajectories of the same question and
broadcast to all its tokens.

R(tau) = sum_t r_t sums a column over the turns ("reward", or an outcome that only the last turn
has). A = (R - mean R) / (std R + eps). With std = False and learner.aggregation = "constant" this
is Dr. GRPO.
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Ddof
from coppice.common.statistics import standardise, within
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="task", least=2, aggregation="trajectory")


def advantages(
    table: TurnTable, column: str = "reward", std: bool = True, ddof: Ddof = 1
) -> np.ndarray:
    trajectories, returns = table.returns(column)
    normalised = within(trajectories.tree, returns, lambda group: standardise(group, std, ddof))
    return table.per_token(normalised[trajectories.of])
