"""SLATE's ablation (a), without truncation: every step of k whole trajectories per question is
judged, and R(tau) = sum_t r_t is normalised over the k trajectories and broadcast to all generated
tokens (methods.md 1.6; estimator A of SLATE's Theorem 1)."""

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.numbers import Positive
from coppice.learner.schemes import grpo
from coppice.learner.update.statistics import Ddof
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trained import scored, trains_on


def needs(**_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task."""
    return SchemeNeeds(
        columns=frozenset({"reward"}), group="task", least=2, aggregation="trajectory"
    )


@trains_on(scored("reward"))
def advantages(table: TurnTable, ddof: Ddof = 1, eps: Positive = 1e-6) -> np.ndarray:
    """Return the advantages, float64 [tokens]."""
    return grpo.advantages(table, "reward", True, ddof, eps)
