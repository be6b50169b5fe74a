"""SLATE's ablation (a), without truncation: every step of k whole trajectories per question is judged, and R(tau) = sum_t r_t is normalised
over the k trajectories and broadcast to all generated tokens (methods.md 1.6; estimator A of SLATE's Theorem 1)."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from learner.schemes import grpo
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Positive


def needs(**_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task."""
    return SchemeNeeds(columns=frozenset({"reward"}), group="task", least=2)


def advantages(table: TurnTable, ddof: Annotated[int, Meta(ge=0, le=1)] = 1, eps: Positive = 1e-6) -> np.ndarray:
    """Return the advantages, float64 [tokens]."""
    return grpo.advantages(table, "reward", True, ddof, eps)
