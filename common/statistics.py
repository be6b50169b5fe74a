"""SLATE's advantage and the statistics behind it. The scheduler selects candidates by this
advantage and the learner trains on it."""

import numpy as np


def centre(values: np.ndarray) -> np.ndarray:
    """Return x - mean. When all values are equal the result is exactly 0, so that a rounding error
    is never scaled up or trained on."""
    return values - values.mean() if np.ptp(values) > 0 else np.zeros(len(values))


def standardise(
    values: np.ndarray, std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> np.ndarray:
    """Return (x - mean) / (std + eps), or x - mean when ``std`` is False. A single value gives 0:
    there is nothing to compare it with."""
    centred = centre(values)
    return centred / (values.std(ddof=ddof) + eps) if std and len(values) > 1 else centred


def among_siblings(rewards: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """Return the advantage of each candidate of one step over its siblings [candidates] (SLATE eq.
    4, methods.md 1.1). A single candidate's is its reward. One without a reward (NaN) gets 0."""
    valid, advantages = np.isfinite(rewards), np.zeros(len(rewards))
    if len(rewards) == 1:
        advantages[valid] = rewards[valid]
    elif valid.any():
        advantages[valid] = standardise(rewards[valid], True, ddof, eps)
    return advantages
