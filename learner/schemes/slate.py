"""SLATE: candidates of one step compete with each other only (SLATE eq. 4, methods.md 1.1).

A_t^j = (r_t^j - mean_j r_t) / (std_j r_t + eps) over the k candidates sampled from one prefix; with k = 1, A = r.
"""

import numpy as np

from learner.table import TurnTable

REQUIRES = ("reward",)


def advantages(table: TurnTable, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """float64 [tokens]. ddof 1 is the sample standard deviation (methods.md 6, row 3), 0 the population's."""
    reward = table.column("reward")
    made = np.empty_like(reward)
    for group in np.unique(table.group):
        rows = table.group == group
        r = reward[rows]
        made[rows] = r if len(r) == 1 else (r - r.mean()) / (r.std(ddof=ddof) + eps)
    return table.per_token(made)
