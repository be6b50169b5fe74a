"""TreePO: a leaf's outcome against the mean of every subtree that it lies in (arXiv 2508.17445).

A(leaf) = the mean over its ancestors a of R - mean(R below a), on all tokens of the path, then
whitened over the tokens of the batch. Below the root, ancestors with a single leaf are left out.
weighting: all ancestors equally ("average", as the released script sets), or by the leaves below
them ("size"). Questions whose leaves all score the same are left out, as by the script's filter of
groups (multimodal-art-projection/TreePO:
``compute_tree_reinforce_plus_plus_baseline_outcome_advantage``, recipe/treepo/run_treepo_train.sh).
"""

from functools import partial
from typing import Literal

import numpy as np

from coppice.common.statistics import whiten
from coppice.learner.forest.segments import segments
from coppice.learner.schemes import reinforce_pp
from coppice.learner.update.table import TurnTable, unequal

trains = unequal("column")

needs = partial(reinforce_pp.needs, baseline="group")


def advantages(
    table: TurnTable, column: str = "outcome",
    weighting: Literal["average", "size"] = "average", leave_out_equal: bool = True,
) -> np.ndarray:  # fmt: skip
    nodes, (trajectories, returns) = segments(table), table.returns(column)
    mean, result = nodes.mean(returns), np.zeros(len(returns))
    for leaf, path in enumerate(nodes.paths):
        above = path[(nodes.leaves[path] > 1) | (nodes.parent[path] < 0)]
        weights = nodes.leaves[above] if weighting == "size" else np.ones(len(above))
        result[leaf] = np.average(returns[leaf] - mean[above], weights=weights)
    return whiten(table.per_token(result[trajectories.of]), table.mask(), ddof=1)
