"""MC-PR, VPR's Monte Carlo baseline: a turn's reward is the temporal difference of Monte Carlo
values (methods.md 3.6).

r_t = V(s_{t+1}) - V(s_t), where V(s) is the mean outcome of continuations from s (column "mc_value"
of the turn that acts in s) and V(terminal) is the outcome. VPR's turn-level normalisation follows.
Neither column alone is the reward: a changed outcome would be compared with values of unchanged
ones.
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Count, Ddof
from coppice.learner.schemes.turn_grpo import by_turn
from coppice.learner.update.table import TurnTable, scored

COLUMNS = frozenset({"mc_value", "outcome"})

trains = scored("outcome")
needs = reads(*COLUMNS, group="batch", aggregation="token")


def advantages(table: TurnTable, n_min: Count = 4, ddof: Ddof = 0) -> np.ndarray:
    """A turn next to a missing value has no difference, so it enters no statistic and gets 0."""
    return table.per_token(by_turn(table.turn, temporal_differences(table), n_min, ddof))


def temporal_differences(table: TurnTable) -> np.ndarray:
    """Return V(s_{t+1}) - V(s_t) [turns], NaN next to a missing value or outcome."""
    values, outcomes = table.column("mc_value"), table.column("outcome")
    differences = np.empty(len(table))
    for rows in table.trajectories().rows:
        after = np.append(values[rows[1:]], outcomes[rows[-1]])
        differences[rows] = after - values[rows]
    return differences
