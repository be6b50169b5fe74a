"""SLATE: candidates of one step compete only with each other (SLATE eq. 4, methods.md 1.1).

A_t^j = (r_t^j - mean_j r_t) / (std_j r_t + eps) over the k candidates sampled from one prefix. With
k = 1, A = r.
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Ddof, Positive
from coppice.common.statistics import among_siblings, within
from coppice.learner.update.table import TurnTable

needs = reads("reward", group="step", aggregation="turn")


def advantages(table: TurnTable, ddof: Ddof = 1, eps: Positive = 1e-6) -> np.ndarray:
    """A candidate without a reward enters no statistic and gets 0. ddof = 1: sample std (methods.md
    6, row 3)."""
    rewards = table.column("reward")
    compared = within(table.group, rewards, lambda siblings: among_siblings(siblings, ddof, eps))
    return table.per_token(compared)
