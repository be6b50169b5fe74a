"""MC-PR, VPR's Monte Carlo baseline: the reward of a turn is the temporal difference of Monte Carlo values (methods.md 3.6).

r_t = V(s_{t+1}) - V(s_t), V(s) the mean outcome of continuations from s (column "mc_value" of the turn that acts in s),
V(terminal) the outcome; then VPR's turn-level normalisation.
"""

import numpy as np

from learner.schemes.turn_grpo import by_turn
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Count, Positive


def needs(value: str, outcome: str, **_: object) -> SchemeNeeds:
    """The turns of whole trajectories of the batch, with Monte Carlo values."""
    return SchemeNeeds(columns=frozenset({value, outcome}), group="batch")


def advantages(
    table: TurnTable, value: str = "mc_value", outcome: str = "outcome", n_min: Count = 4, eps: Positive = 1e-8
) -> np.ndarray:
    """float64 [tokens]. A turn next to a missing value has no difference: it enters no statistic and gets 0."""
    return table.per_token(by_turn(table.turn, temporal_differences(table, value, outcome), n_min, eps))


def temporal_differences(table: TurnTable, value: str = "mc_value", outcome: str = "outcome") -> np.ndarray:
    """V(s_{t+1}) - V(s_t) [turns]; an episode without an outcome ends at 0 (a timeout)."""
    values, outcomes = table.column(value), np.nan_to_num(table.column(outcome), posinf=np.inf, neginf=-np.inf)
    made = np.empty(len(table))
    for rows in table.trajectories().rows:
        after = np.append(values[rows[1:]], outcomes[rows[-1]])
        made[rows] = after - values[rows]
    return made
