"""What an update maximises: the reward that its scheme reads, and how much each token weighs."""

from typing import Literal

import msgspec
import numpy as np

from coppice.learner.config import LearnerConfig
from coppice.learner.update.table import TurnTable

Aggregation = Literal["turn", "trajectory", "token", "constant"]


def token_weights(
    table: TurnTable, sampled: np.ndarray, aggregation: Aggregation, constant_tokens: int = 0,
    steps: bool = True,
) -> np.ndarray:  # fmt: skip
    """Return the weight of each token's term, float64 [tokens], fixed for the whole update, so that
    every split over micro-batches and ranks gives the same gradient. Forced tokens get 0, because
    they have no sampling probability.

    "turn" (SLATE, methods.md 1.2) takes the mean over the tokens of a candidate, the mean over the
    trajectories of its group, the sum over the steps of a tree and the mean over the questions in
    the table. "trajectory" (GRPO) begins with the mean over a trajectory's tokens instead. "token"
    is the mean over all trained tokens. "constant" (Dr. GRPO) divides the sum over a trajectory's
    tokens by a constant, so that length carries no weight. sampled: bool [tokens]. steps: the
    groups of a question are its steps; otherwise (Tree-GRPO's trees) they count as one.
    """
    sampled = sampled.astype(np.float64)
    if aggregation == "token":
        return sampled / max(1.0, sampled.sum())
    questions = len(np.unique(table.tree))
    counts = np.bincount(table.row(), weights=sampled, minlength=len(table))
    scale, of = np.empty(len(table)), table.trajectories().of
    groups = table.group if steps else table.tree
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        names, member = np.unique(of[rows], return_inverse=True)
        tokens = counts[rows]
        if aggregation == "trajectory":
            tokens = np.bincount(member, weights=tokens)[member]
        elif aggregation == "constant":
            tokens = np.full(len(rows), float(constant_tokens))
        scale[rows] = 1.0 / (np.maximum(tokens, 1.0) * len(names) * questions)
    return sampled * table.per_token(scale)


def shaped(table: TurnTable, column: str, config: LearnerConfig) -> TurnTable:
    """Return the table with the changed reward ``column`` (``SchemeNeeds.reward_column``), or the
    same if nothing changes it.

    A score is multiplied by reward_scale and then clipped to [-reward_clip, reward_clip]. Then the
    turn's soft overlong punishment and its KL penalty (token column "kl") are subtracted. A turn
    without a score (an outcome is a score of the last turn alone) passes them on to the next turn
    that has one, so a sum of rewards over a trajectory holds its whole KL.
    """
    c, long, penalties = config, config.soft_overlong, np.zeros(len(table))
    if c.reward_scale == 1 and not (c.reward_clip or long or c.kl_reward_coef):
        return table
    scores = table.column(column) * c.reward_scale
    if c.reward_clip:
        scores = np.clip(scores, -c.reward_clip, c.reward_clip)
    if long is not None:
        tokens = table.per_turn(np.ones(len(table.mask())))
        penalties += overlong(tokens, long.max_tokens, long.cache_tokens)
    if c.kl_reward_coef:
        penalties += c.kl_reward_coef * table.per_turn(table.token_column("kl"))
    for rows in table.trajectories().rows:
        owed = 0.0
        for row in rows:
            owed += penalties[row]
            if not np.isnan(scores[row]):
                scores[row] -= owed
                owed = 0.0
    return msgspec.structs.replace(table, scores={**table.scores, column: scores})


def overlong(tokens: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """Return DAPO's soft overlong punishment (eq. 13) with the opposite sign: 0 up to max - cache
    tokens, then linear, 1 from max tokens."""
    return np.clip((tokens - (max_tokens - cache_tokens)) / cache_tokens, 0.0, 1.0)


def truncated(table: TurnTable) -> np.ndarray:
    """Return, as bool [turns], whether the token limit cut an action of the turn's trajectory
    (column "truncated")."""
    trajectories = table.trajectories()
    cut = table.scores.get("truncated", np.zeros(len(table)))
    return trajectories.total(cut)[trajectories.of] > 0
