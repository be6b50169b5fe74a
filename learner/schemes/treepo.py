"""TreePO: a leaf's outcome against the mean of every subtree that it lies in (arXiv 2508.17445).

A(leaf) = the mean over its ancestors a of R - mean(R below a), weighted by the leaves below a (weighting = "size") or equally ("plain"), on
all tokens of the path, then whitened over the tokens of the batch. Below the root, ancestors with a single leaf are left out.
"""

from typing import Literal

import numpy as np

from learner.segments import segments
from learner.statistics import whiten
from learner.table import TurnTable
from learner.trained import scored, trains_on
from wire.declared import SchemeNeeds


def needs(column: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task."""
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2, aggregation="token")


@trains_on(scored("column"))
def advantages(table: TurnTable, column: str = "outcome", weighting: Literal["size", "plain"] = "size") -> np.ndarray:
    """Return float64 [tokens]."""
    nodes, trajectories = segments(table), table.trajectories()
    returns = trajectories.total(table.column(column))
    mean, result = nodes.mean(returns), np.zeros(len(returns))
    for leaf, path in enumerate(nodes.paths):
        above = path[(nodes.leaves[path] > 1) | (nodes.parent[path] < 0)]
        weights = nodes.leaves[above] if weighting == "size" else np.ones(len(above))
        result[leaf] = np.average(returns[leaf] - mean[above], weights=weights)
    return whiten(table.per_token(result[trajectories.of]), table.mask())
