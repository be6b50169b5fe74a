"""SLATE's ablation (a), without truncation: every step of k whole trajectories per question is
judged, and R(tau) = sum_t r_t is normalised over the k trajectories and broadcast to all generated
tokens (methods.md 1.6; estimator A of SLATE's Theorem 1)."""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Ddof
from coppice.learner.schemes import grpo
from coppice.learner.update.table import TurnTable, scored

trains = scored("reward")
needs = reads("reward", group="task", least=2, aggregation="trajectory")


def advantages(table: TurnTable, ddof: Ddof = 1) -> np.ndarray:
    return grpo.advantages(table, "reward", True, ddof)
