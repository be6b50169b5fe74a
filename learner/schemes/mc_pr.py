"""MC-PR, VPR's Monte Carlo baseline: a turn's reward is the temporal difference of Monte Carlo
values (methods.md 3.6).

r_t = V(s_{t+1}) - V(s_t), where V(s) is the mean outcome of continuations from s (column "mc_value"
of the turn that acts in s) and V(terminal) is the outcome. VPR's turn-level normalisation follows.
Neither column alone is the reward: a changed outcome would be compared with values of unchanged
ones.
"""

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.numbers import Count, Positive
from coppice.learner.schemes.turn_grpo import by_turn
from coppice.learner.update.statistics import Ddof
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trained import scored, trains_on


def needs(value: str, outcome: str, **_: object) -> SchemeNeeds:
    """The scheme needs all turns of whole trajectories, with Monte Carlo values."""
    return SchemeNeeds(columns=frozenset({value, outcome}), group="batch", aggregation="token")


@trains_on(scored("outcome"))
def advantages(
    table: TurnTable,
    value: str = "mc_value",
    outcome: str = "outcome",
    n_min: Count = 4,
    ddof: Ddof = 0,
    eps: Positive = 1e-8,
) -> np.ndarray:
    """Return float64 [tokens]. A turn next to a missing value has no difference, so it enters no
    statistic and gets 0."""
    return table.per_token(
        by_turn(table.turn, temporal_differences(table, value, outcome), n_min, eps, ddof)
    )


def temporal_differences(
    table: TurnTable, value: str = "mc_value", outcome: str = "outcome"
) -> np.ndarray:
    """Return V(s_{t+1}) - V(s_t) [turns], NaN next to a missing value or outcome."""
    values, outcomes = table.column(value), table.column(outcome)
    differences = np.empty(len(table))
    for rows in table.trajectories().rows:
        after = np.append(values[rows[1:]], outcomes[rows[-1]])
        differences[rows] = after - values[rows]
    return differences
