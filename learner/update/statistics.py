"""Statistics that the schemes share: centring, scaling and leaving one out, within groups of
values."""

from collections.abc import Callable

import numpy as np

from coppice.common.numbers import Ddof
from coppice.common.statistics import centre, standardise

__all__ = ["Ddof", "centre", "leave_one_out", "standardise", "whiten", "within"]


def within(
    groups: np.ndarray, values: np.ndarray, change: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Apply ``change`` to the values of each group separately. groups: the group of each value.
    Groups, values and result are [n]."""
    changed = np.zeros(len(values))
    for group in np.unique(groups):
        members = groups == group
        changed[members] = change(values[members])
    return changed


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
