"""Means over seeds with their 95% intervals."""

import math

import numpy as np

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95% quantiles of Student's t by degrees of freedom."""


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its 95% interval by Student's t (nan for one
    seed)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    return mean, T_95[min(9, len(values) - 1)] * float(np.std(values, ddof=1)) / math.sqrt(
        len(values)
    )


def shown(estimate: tuple[float, float]) -> str:
    """Return a mean and its half width in words, "0.500 ±0.100", or the mean alone if it has no
    interval."""
    return (
        f"{estimate[0]:.3f} ±{estimate[1]:.3f}"
        if not math.isnan(estimate[1])
        else f"{estimate[0]:.3f}"
    )
