"""SLATE's ablation (a), without truncation: k whole trajectories a question, every step judged, R(tau) = sum_t r_t, normalised over
the k and broadcast to all generated tokens (methods.md 1.6; estimator A of SLATE's Theorem 1)."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from learner.schemes import grpo
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import Positive


def needs(**_: object) -> SchemeNeeds:
    """Whole trajectories of one task, two at least."""
    return SchemeNeeds(columns=frozenset({"reward"}), group="task", least=2)


def advantages(table: TurnTable, ddof: Annotated[int, Meta(ge=0, le=1)] = 1, eps: Positive = 1e-6) -> np.ndarray:
    """float64 [tokens]."""
    return grpo.advantages(table, "reward", True, ddof, eps)
