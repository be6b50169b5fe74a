"""VPR's turn-level GRPO: the oracle reward of a turn, compared with all trajectories of the batch
at the same turn (methods.md 3.5).

A_{i,t} = (r - mean_t) / (std_t + eps) over the trajectories still active at turn t. If they are
fewer than n_min, mean and standard deviation are those of all turns of the batch. The std is the
population's (ddof = 0). gamma = 0, so a turn's tokens share one advantage.
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Count, Ddof
from coppice.common.statistics import standardise
from coppice.learner.update.table import TurnTable

needs = reads("column", group="batch", aggregation="token")


def advantages(
    table: TurnTable, column: str = "reward", n_min: Count = 4, ddof: Ddof = 0
) -> np.ndarray:
    """A turn whose score is missing enters no statistic and gets 0."""
    return table.per_token(by_turn(table.turn, table.column(column), n_min, ddof))


def by_turn(turn: np.ndarray, rewards: np.ndarray, n_min: int, ddof: int = 0) -> np.ndarray:
    """Return the rewards standardised over the batch's turns of equal numbers [turns]."""
    scored = ~np.isnan(rewards)
    normalised = np.zeros(len(rewards))
    if scored.any():
        normalised[scored] = standardise(rewards[scored], True, ddof, 1e-8)
    for t in np.unique(turn[scored]):
        active = scored & (turn == t)
        if active.sum() >= max(2, n_min):
            normalised[active] = standardise(rewards[active], True, ddof, 1e-8)
    return normalised
