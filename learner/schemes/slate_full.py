"""SLATE's ablation (a), without truncation: k whole trajectories a question, every step judged, R(tau) = sum_t r_t, normalised over
the k and broadcast to all generated tokens (methods.md 1.6; estimator A of SLATE's Theorem 1)."""

import numpy as np

from learner.schemes import grpo
from learner.table import TurnTable


def advantages(table: TurnTable, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """float64 [tokens]."""
    return grpo.advantages(table, "reward", True, ddof, eps)
