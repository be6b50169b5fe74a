"""GRPO: the return of a trajectory against the other trajectories of its question, broadcast to all its tokens.

R(tau) = sum_t r_t over the turns of a column ("reward", or an outcome that only the last turn has); A = (R - mean R) / (std R + eps).
std = False is Dr. GRPO (with learner.aggregation = "constant").
"""

from typing import Annotated

import numpy as np
from msgspec import Meta

from learner.statistics import standardise, within
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Positive


def needs(column: str, **_: object) -> SchemeNeeds:
    """Whole trajectories of one task, two at least."""
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2)


def advantages(
    table: TurnTable,
    column: str = "reward",
    std: bool = True,
    ddof: Annotated[int, Meta(ge=0, le=1)] = 1,
    eps: Positive = 1e-6,
) -> np.ndarray:
    """float64 [tokens]. A missing score adds nothing to the return."""
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(column))
    made = within(trajectories.tree, returns, lambda group: standardise(group, std, ddof, eps))
    return table.per_token(made[trajectories.of])
