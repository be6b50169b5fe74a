"""REINFORCE++: the return minus the mean return of its question, whitened over all tokens of the batch (methods.md 4.3).

With baseline = "none" the return itself is whitened, which is the original method without groups (Hu et al. 2025).
"""

from typing import Literal

import numpy as np

from learner.statistics import Ddof, centre, whiten, within
from learner.table import TurnTable
from learner.trained import scored, trains_on
from wire.declared import SchemeNeeds


def needs(column: str, baseline: str, **_: object) -> SchemeNeeds:
    """The scheme compares the trajectories of a task if the task's mean is the baseline, else those of the batch."""
    grouped = baseline == "group"
    return SchemeNeeds(
        columns=frozenset({column}),
        group="task" if grouped else "batch",
        least=2 if grouped else 1,
        aggregation="token",
    )


@trains_on(scored("column"))
def advantages(
    table: TurnTable, column: str = "reward", baseline: Literal["group", "none"] = "group", whiten_ddof: Ddof = 0
) -> np.ndarray:
    """Return float64 [tokens]."""
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(column))
    if baseline == "group":
        returns = within(trajectories.tree, returns, centre)
    return whiten(table.per_token(returns[trajectories.of]), table.mask(), whiten_ddof)
