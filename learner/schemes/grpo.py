"""GRPO: the return of a trajectory against the other trajectories of its question, broadcast to all its tokens.

R(tau) = sum_t r_t over the turns of a column ("reward", or an outcome that only the last turn has); A = (R - mean R) / (std R + eps).
std = False is Dr. GRPO (with learner.aggregation = "constant").
"""

import numpy as np

from learner.statistics import standardise, within
from learner.table import TurnTable


def advantages(
    table: TurnTable, column: str = "reward", std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> np.ndarray:
    """float64 [tokens]. A missing score adds nothing to the return."""
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(column))
    made = within(trajectories.tree, returns, lambda group: standardise(group, std, ddof, eps))
    return table.per_token(made[trajectories.of])
