"""ARPO: GRPO over the leaves of a tree; tokens that several leaves share get each leaf's advantage
or their mean (arXiv 2507.19849).

sharing = "soft" trains a shared token once in each leaf with that leaf's advantage, which is plain
GRPO and the paper's default; "hard" gives it the mean of the advantages of the leaves below it.
"""

from typing import Literal

import numpy as np

from coppice.common.declared import reads
from coppice.common.statistics import standardise, within
from coppice.learner.forest.segments import segments
from coppice.learner.schemes import grpo
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="task", least=2, aggregation="trajectory")


def advantages(
    table: TurnTable, column: str = "outcome", sharing: Literal["soft", "hard"] = "soft"
) -> np.ndarray:
    if sharing == "soft":
        return grpo.advantages(table, column)
    shared, (trajectories, returns) = segments(table), table.returns(column)
    leaves = within(trajectories.tree, returns, standardise)
    return shared.mean(leaves)[shared.of]
