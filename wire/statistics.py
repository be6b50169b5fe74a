"""SLATE's advantage, which the scheduler selects by and the learner trains on, and the statistics it is made of."""

import numpy as np


def centre(values: np.ndarray) -> np.ndarray:
    """x - mean; exactly 0 where all values are equal, so that rounding is never scaled up or trained on."""
    return values - values.mean() if np.ptp(values) > 0 else np.zeros(len(values))


def standardise(values: np.ndarray, std: bool = True, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """(x - mean) / (std + eps), or x - mean; 0 for a single value, which has nothing to be compared with."""
    centred = centre(values)
    return centred / (values.std(ddof=ddof) + eps) if std and len(values) > 1 else centred


def among_siblings(rewards: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """The advantage of each candidate of one step over its siblings [candidates] (SLATE eq. 4, methods.md 1.1); of a single candidate its reward.

    A candidate without a reward (NaN) enters no statistic and gets 0.
    """
    there, advantages = np.isfinite(rewards), np.zeros(len(rewards))
    if there.any():
        advantages[there] = rewards if len(rewards) == 1 else standardise(rewards[there], True, ddof, eps)
    return advantages
