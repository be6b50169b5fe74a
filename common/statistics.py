"""Statistics that schemes and strategies share: centring, scaling and leaving one out, and SLATE's
advantage, by which the scheduler selects and on which the learner trains."""

from collections.abc import Callable

import numpy as np


def within(
    groups: np.ndarray, values: np.ndarray, change: Callable[[np.ndarray], np.ndarray | float]
) -> np.ndarray:
    """Apply ``change`` to the values of each group separately; a single number that it returns
    stands for each member. groups: the group of each value. Groups, values and result are [n]."""
    changed = np.zeros(len(values))
    for group in np.unique(groups):
        members = groups == group
        changed[members] = change(values[members])
    return changed


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


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """Return x minus the mean of the others, which is n / (n - 1) (x - mean), and 0 for a single
    value."""
    n = len(values)
    return centre(values) * (n / (n - 1)) if n > 1 else np.zeros(1)


def whiten(values: np.ndarray, mask: np.ndarray, ddof: int = 0, eps: float = 1e-8) -> np.ndarray:
    """Scale values [tokens] to mean 0 and variance 1 over the tokens of ``mask``. The result is 0
    elsewhere."""
    whitened = np.zeros_like(values)
    if mask.any():
        whitened[mask] = standardise(values[mask], True, ddof, eps)
    return whitened


def among_siblings(rewards: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """Return the advantage of each candidate of one step over its siblings [candidates] (SLATE eq.
    4, methods.md 1.1). A single candidate's is its reward. One without a reward (NaN) gets 0."""
    valid, advantages = np.isfinite(rewards), np.zeros(len(rewards))
    if len(rewards) == 1:
        advantages[valid] = rewards[valid]
    elif valid.any():
        advantages[valid] = standardise(rewards[valid], True, ddof, eps)
    return advantages
