"""How the learner changes the reward (the column ``SchemeNeeds.reward``) before a scheme reads it.

A score is multiplied by reward_scale and then clipped to [-reward_clip, reward_clip]. Then the
turn's soft overlong punishment and its KL penalty are subtracted. A turn without a score (an
outcome is a score of the last turn alone) passes them on to the next turn that has one, so a sum of
rewards over a trajectory holds its whole KL.
"""

import msgspec
import numpy as np

from coppice.learner.config import LearnerConfig
from coppice.learner.update.table import TurnTable


def shaped(table: TurnTable, column: str, config: LearnerConfig) -> TurnTable:
    """Return the table with the changed reward ``column``, or the same if nothing changes it. The
    KL penalty reads the token column "kl"."""
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
    scores = charged(table, scores, penalties)
    return msgspec.structs.replace(table, scores={**table.scores, column: scores})


def overlong(tokens: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """Return DAPO's soft overlong punishment (eq. 13) with the opposite sign: 0 up to max - cache
    tokens, then linear, 1 from max tokens."""
    return np.clip((tokens - (max_tokens - cache_tokens)) / cache_tokens, 0.0, 1.0)


def charged(table: TurnTable, scores: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """Subtract each turn's penalty from the first score of its trajectory at this turn or later.
    Scores, penalties and result are [turns]."""
    scores = scores.copy()
    for rows in table.trajectories().rows:
        owed = 0.0
        for row in rows:
            owed += penalties[row]
            if not np.isnan(scores[row]):
                scores[row] -= owed
                owed = 0.0
    return scores


def truncated(table: TurnTable) -> np.ndarray:
    """Return, as bool [turns], whether the token limit cut an action of the turn's trajectory
    (column "truncated")."""
    trajectories = table.trajectories()
    cut = table.scores.get("truncated", np.zeros(len(table)))
    return trajectories.total(cut)[trajectories.of] > 0
