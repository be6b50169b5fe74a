"""Tree-GRPO: a leaf's outcome against all leaves of the question plus against the leaves of its
tree (arXiv 2509.21240).

A = z(R; leaves of the question) + z(R; leaves of the tree), z(x; S) = (x - mean S) / (std S + eps)
with the sample std, on all tokens of the path from the prompt to the leaf. Each group of the
strategy ``tree_grpo`` is a tree. A set of one leaf has nothing to compare and gives 0 (the released
code gives R itself, which is not centred).
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.statistics import standardise, within
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="task", least=2, aggregation="trajectory")


def advantages(table: TurnTable, column: str = "outcome") -> np.ndarray:
    trajectories, returns = table.returns(column)
    trees = table.group[[rows[0] for rows in trajectories.rows]]
    both = within(trajectories.tree, returns, standardise)
    both += within(trees, returns, standardise)
    return table.per_token(both[trajectories.of])
