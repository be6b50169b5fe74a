"""SPO: a segment earns the difference of the values at its end and at its start (SPO-tree, arXiv 2505.23564).

V(node) is the mean over its children, down to the outcome at a leaf: a mean over the leaves weighted by the column ``weight`` of the strategy
``spo`` (equal weights without it). A(segment) = V(end) - V(start). Tokens that the policy sampled with a probability of ``certain`` or more
get 0 (released code: 0.9); the others are whitened over the batch (released code) if ``whiten``.
"""

import math

import numpy as np

from learner.segments import segments
from learner.statistics import whiten as whiten_tokens
from learner.table import TurnTable
from learner.trained import scored, trains_on
from wire.declared import SchemeNeeds
from wire.numbers import Positive


def needs(column: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task."""
    return SchemeNeeds(columns=frozenset({column}), group="task", least=2, aggregation="token")


@trains_on(scored("column"))
def advantages(table: TurnTable, column: str = "outcome", certain: Positive = 0.9, whiten: bool = True) -> np.ndarray:
    """Return float64 [tokens]. certain: more than 1 masks no token."""
    edges, trajectories = segments(table), table.trajectories()
    leaf_weights = trajectories.total(table.scores["weight"]) if "weight" in table.scores else None
    value = edges.mean(trajectories.total(table.column(column)), leaf_weights)
    advantage = (value - edges.above(value))[edges.of]
    chosen = table.mask() & (np.concatenate([turn.logprobs for turn in table.actions]) < math.log(certain))
    return whiten_tokens(advantage, chosen) if whiten else np.where(chosen, advantage, 0.0)
