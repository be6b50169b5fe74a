"""VPR's turn-level GRPO: the oracle reward of a turn against all trajectories of the batch at the same turn (methods.md 3.5).

A_{i,t} = (r - mean_t) / (std_t + eps) over the trajectories still active at turn t; with fewer than n_min of them, the mean and
standard deviation over all turns of the batch. Population std. gamma = 0: a turn's tokens share its advantage.
"""

import numpy as np

from learner.statistics import standardise
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Count, Positive


def needs(column: str, **_: object) -> SchemeNeeds:
    """The turns of whole trajectories of the batch."""
    return SchemeNeeds(columns=frozenset({column}), group="batch")


def advantages(table: TurnTable, column: str = "reward", n_min: Count = 4, eps: Positive = 1e-8) -> np.ndarray:
    """float64 [tokens]. A turn whose score is missing enters no statistic and gets 0."""
    return table.per_token(by_turn(table.turn, table.column(column), n_min, eps))


def by_turn(turn: np.ndarray, rewards: np.ndarray, n_min: int, eps: float) -> np.ndarray:
    """Rewards [turns] standardised over the batch at equal turn numbers [turns]."""
    there = ~np.isnan(rewards)
    made = np.zeros(len(rewards))
    if not there.any():
        return made
    whole = np.zeros(len(rewards))
    whole[there] = standardise(rewards[there], True, 0, eps)
    for t in np.unique(turn[there]):
        active = there & (turn == t)
        r = rewards[active]
        made[active] = standardise(r, True, 0, eps) if len(r) >= max(2, n_min) else whole[active]
    return made
