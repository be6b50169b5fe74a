"""OR, VPR's outcome baseline: an episode's return, compared with all episodes of the batch, on all
its turns (methods.md 3.6)."""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Ddof
from coppice.common.statistics import standardise
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="batch", aggregation="token")


def advantages(table: TurnTable, column: str = "outcome", ddof: Ddof = 0) -> np.ndarray:
    """The environments give an episode that ran out of turns the outcome 0."""
    trajectories, returns = table.returns(column)
    return table.per_token(standardise(returns, True, ddof, 1e-8)[trajectories.of])
