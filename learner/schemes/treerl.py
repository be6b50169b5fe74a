"""TreeRL: what a step gained over the whole question and over the step before it (arXiv
2506.11902).

A leaf's outcome minus the mean of the question's other leaves is averaged over the leaves below
each step: V, which is 0 at the root. form = "paper": A(s) = [(V(s) - V(root)) + (V(s) - V(parent))]
/ sqrt(leaves below s). form = "released" divides each value by the root of its own leaves: with
U(s) = V(s) / sqrt(leaves below s), A(s) = U(s) + gain(s) and gain(s) = U(s) - U(parent). A gain of
0 is that of the step before (THUDM/TreeRL: ``compute_weighted_update``, ``path_from_root_to_node``
and ``fill_in_paths``).
"""

from typing import Literal

import numpy as np

from coppice.common.declared import reads
from coppice.common.statistics import leave_one_out, within
from coppice.learner.forest.segments import segments
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="task", least=2, aggregation="trajectory")


def advantages(
    table: TurnTable, column: str = "outcome", form: Literal["released", "paper"] = "released"
) -> np.ndarray:
    steps, (trajectories, returns) = segments(table), table.returns(column)
    value = steps.mean(within(trajectories.tree, returns, leave_one_out))
    root = np.sqrt(steps.leaves)
    if form == "paper":
        return np.where(steps.parent < 0, 0.0, (2 * value - steps.above(value)) / root)[steps.of]
    own = np.where(steps.parent < 0, 0.0, value / root)
    gain = own - steps.above(own)
    for step in np.flatnonzero((np.abs(gain) < 1e-8) & (steps.parent >= 0)):
        gain[step] = gain[steps.parent[step]]
    return (own + gain)[steps.of]
