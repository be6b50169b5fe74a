"""How the learner changes the reward before a scheme reads it. The reward is the column that the
scheme declares (``SchemeNeeds.reward``).

A score is multiplied by reward_scale and then clipped to [-reward_clip, reward_clip]. Then the
turn's soft overlong punishment and its KL penalty are subtracted. A turn whose score is missing (an
outcome is a score of the last turn alone) passes them on to the next turn of its trajectory that
has a score. So a scheme that sums rewards over a trajectory sees the whole trajectory's KL.
"""

import msgspec
import numpy as np

from coppice.learner.config import LearnerConfig
from coppice.learner.update.table import TurnTable


def shaped(table: TurnTable, column: str, config: LearnerConfig) -> TurnTable:
    """Return the table with the changed reward ``column``. The KL penalty reads the token column
    "kl"."""
    scores, penalties = table.column(column) * config.reward_scale, np.zeros(len(table))
    if config.reward_clip:
        scores = np.clip(scores, -config.reward_clip, config.reward_clip)
    if config.soft_overlong is not None:
        limit, cache = config.soft_overlong.max_tokens, config.soft_overlong.cache_tokens
        penalties += overlong(table.per_turn(np.ones(len(table.mask()))), limit, cache)
    if config.kl_reward_coef:
        penalties += config.kl_reward_coef * table.per_turn(table.token_column("kl"))
    return msgspec.structs.replace(
        table, scores={**table.scores, column: charged(table, scores, penalties)}
    )


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
