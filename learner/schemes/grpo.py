"""GRPO: the return of a trajectory against the other trajectories of its question, broadcast to all its tokens.

R(tau) = sum_t r_t (column "reward") or the outcome of its last turn (column "outcome"); A = (R - mean R) / (std R + eps).
std = False is Dr. GRPO. With full trajectories and "reward" this is SLATE's ablation (a), estimator A of its Theorem 1.
"""

import numpy as np

from learner.table import TurnTable

REQUIRES = ("reward",)


def advantages(
    table: TurnTable, column: str = "reward", std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> np.ndarray:
    """float64 [tokens]. A missing score adds nothing to the return."""
    score = np.nan_to_num(table.column(column))
    made = np.zeros(len(table))
    for tree in np.unique(table.tree):
        rows = np.flatnonzero(table.tree == tree)
        names, member = np.unique(table.trajectory[rows], return_inverse=True)
        returns = np.bincount(member, weights=score[rows], minlength=len(names))
        centred = returns - returns.mean()
        if std and len(names) > 1:
            centred = centred / (returns.std(ddof=ddof) + eps)
        made[rows] = centred[member]
    return table.per_token(made)
