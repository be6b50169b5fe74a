"""Statistics the schemes share: centring, scaling and leaving one out, within groups of values."""

from collections.abc import Callable

import numpy as np

from wire.statistics import centre, standardise

__all__ = ["centre", "leave_one_out", "standardise", "whiten", "within"]


def within(groups: np.ndarray, values: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """``change`` applied to the values of each group separately. groups: identities, values and result: [n]."""
    made = np.zeros(len(values))
    for group in np.unique(groups):
        members = groups == group
        made[members] = change(values[members])
    return made


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """x - mean of the others = n / (n - 1) (x - mean); 0 for a single value."""
    n = len(values)
    return centre(values) * (n / (n - 1)) if n > 1 else np.zeros(1)


def whiten(values: np.ndarray, mask: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    """Mean 0 and variance 1 over the tokens of ``mask``, 0 elsewhere. values: float64 [tokens]."""
    if not mask.any():
        return np.zeros_like(values)
    inside = values[mask]
    made = np.zeros_like(values)
    made[mask] = centre(inside) / (inside.std() + eps)
    return made
