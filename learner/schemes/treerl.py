"""TreeRL: what a step gained over the whole question and over the step before it (arXiv 2506.11902).

A leaf's outcome minus the mean of the question's other leaves is averaged over the leaves below each step: V, which is 0 at the root. Then
A = [(V(s) - V(root)) + (V(s) - V(parent))] / sqrt(leaves below s). A step whose A is 0 takes that of the step before it.
"""

import numpy as np

from learner.segments import segments
from learner.statistics import leave_one_out, within
from learner.table import TurnTable
from learner.trained import scored, trains_on
from wire.declared import SchemeNeeds


def needs(column: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task."""
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2, aggregation="trajectory")


@trains_on(scored("column"))
def advantages(table: TurnTable, column: str = "outcome") -> np.ndarray:
    """Return float64 [tokens]."""
    steps, trajectories = segments(table), table.trajectories()
    value = steps.mean(within(trajectories.tree, trajectories.total(table.column(column)), leave_one_out))
    advantage = np.where(steps.parent < 0, 0.0, (2 * value - steps.above(value)) / np.sqrt(steps.leaves))
    for step in np.flatnonzero((np.abs(advantage) < 1e-12) & (steps.parent >= 0)):
        advantage[step] = advantage[steps.parent[step]]
    return advantage[steps.of]
