"""Tree-GRPO: a leaf's outcome against all leaves of the question plus against the leaves of its
tree (arXiv 2509.21240).

A = z(R; leaves of the question) + z(R; leaves of the tree), z(x; S) = (x - mean S) / (std S + eps)
with the sample std, on all tokens of the path from the prompt to the leaf. Each group of the
strategy ``tree_grpo`` is a tree. A set of one leaf has nothing to compare and gives 0 (the released
code gives R itself, which is not centred).
"""

from functools import partial

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.numbers import Positive
from coppice.learner.update.statistics import standardise, within
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trained import scored, trains_on


def needs(column: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task."""
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2, aggregation="trajectory")


@trains_on(scored("column"))
def advantages(table: TurnTable, column: str = "outcome", eps: Positive = 1e-6) -> np.ndarray:
    """Return float64 [tokens]."""
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(column))
    trees = table.group[[rows[0] for rows in trajectories.rows]]
    z = partial(standardise, ddof=1, eps=eps)
    both = within(trajectories.tree, returns, z) + within(trees, returns, z)
    return table.per_token(both[trajectories.of])
