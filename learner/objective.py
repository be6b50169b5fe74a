"""The objective of one update: how much each trained token weighs. Weights are fixed for the whole update before the backward,
so every split over micro-batches and ranks gives the same gradient.

turn (SLATE, methods.md 1.2): token-mean of a candidate, mean over the trajectories of its group, sum over the steps of a
tree, mean over questions. trajectory (GRPO): token-mean of a trajectory instead. token: mean over all trained tokens.
constant (Dr. GRPO): sum over a trajectory's tokens divided by a constant, so that length carries no weight.
"""

from typing import Literal

import numpy as np

from learner.table import TurnTable

Aggregation = Literal["turn", "trajectory", "token", "constant"]


def token_weights(
    table: TurnTable,
    sampled: np.ndarray,
    questions: int,
    aggregation: Aggregation,
    mean_over_steps: bool = False,
    constant_tokens: int = 0,
) -> np.ndarray:
    """float64 [tokens]: the weight of each token's term; 0 for forced tokens, which have no sampling probability.

    sampled: bool [tokens]. questions: trees of the update, those without a trained group included. mean_over_steps divides by the groups of a tree.
    """
    sampled = sampled.astype(np.float64)
    if aggregation == "token":
        return sampled / max(1.0, sampled.sum())
    row = np.repeat(np.arange(len(table)), table.tokens)
    counts = np.bincount(row, weights=sampled, minlength=len(table))
    scale = np.empty(len(table))
    for group in np.unique(table.group):
        rows = np.flatnonzero(table.group == group)
        names, member = np.unique(table.trajectory[rows], return_inverse=True)
        if aggregation == "constant":
            tokens = np.full(len(rows), float(constant_tokens))
        else:
            tokens = np.bincount(member, weights=counts[rows])[member] if aggregation == "trajectory" else counts[rows]
        scale[rows] = 1.0 / (np.maximum(tokens, 1.0) * len(names) * questions)
    if mean_over_steps:
        for tree in np.unique(table.tree):
            rows = table.tree == tree
            scale[rows] /= len(np.unique(table.group[rows]))
    return sampled * np.repeat(scale, table.tokens)
