"""The objective of one update: how much each trained token weighs. Weights are fixed for the whole
update before the backward, so every split over micro-batches and ranks gives the same gradient.

"turn" (SLATE, methods.md 1.2) takes the mean over the tokens of a candidate, the mean over the
trajectories of its group, the sum over the steps of a tree and the mean over questions.
"trajectory" (GRPO) begins with the mean over a trajectory's tokens instead. "token" is the mean
over all trained tokens. "constant" (Dr. GRPO) divides the sum over a trajectory's tokens by a
constant, so that length carries no weight.
"""

from typing import Literal

import numpy as np

from coppice.learner.update.table import TurnTable

Aggregation = Literal["turn", "trajectory", "token", "constant"]


def token_weights(
    table: TurnTable, sampled: np.ndarray, aggregation: Aggregation,
    mean_over_steps: bool = False, constant_tokens: int = 0,
) -> np.ndarray:  # fmt: skip
    """Return the weight of each token's term, float64 [tokens]. Forced tokens get 0, because they
    have no sampling probability.

    The mean over questions is over those in the table: one whose scores are all missing is not in
    it. sampled: bool [tokens]. mean_over_steps: divide by the tree's groups.
    """
    sampled = sampled.astype(np.float64)
    if aggregation == "token":
        return sampled / max(1.0, sampled.sum())
    questions = len(np.unique(table.tree))
    counts = np.bincount(table.row(), weights=sampled, minlength=len(table))
    scale = np.empty(len(table))
    for group in np.unique(table.group):
        rows = np.flatnonzero(table.group == group)
        names, member = np.unique(table.trajectory[rows], return_inverse=True)
        tokens = counts[rows]
        if aggregation == "trajectory":
            tokens = np.bincount(member, weights=tokens)[member]
        elif aggregation == "constant":
            tokens = np.full(len(rows), float(constant_tokens))
        scale[rows] = 1.0 / (np.maximum(tokens, 1.0) * len(names) * questions)
    if mean_over_steps:
        for tree in np.unique(table.tree):
            rows = table.tree == tree
            scale[rows] /= len(np.unique(table.group[rows]))
    return sampled * table.per_token(scale)
