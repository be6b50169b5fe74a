"""SLATE (arXiv 2602.23440): the variance of advantages from k actions after one prefix, against G
whole trajectories.

Every step reward comes from independent noise in {-1, 0, 1} with probabilities 1/4, 1/4, 1/2. A
process says how the reward depends on earlier steps. Source: SLATE section 4 and appendix A.4-A.7;
methods.md 5.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coppice.research.theories import BATCHES, BatchEstimate, ClaimRow, drawn, estimate, stacked

Array = NDArray[np.float64]
# (earlier noise, earlier rewards, noise) -> reward
Process = Callable[[list[Array], list[Array], Array], Array]

NOISE = np.array([-1.0, 0.0, 1.0, 1.0])
HORIZONS = (2, 4, 8)
GROUP = 5
FIRST = slice(1)
SELECTION = 0.7  # SLATE's eta: the temperature of the softmax by which a candidate is continued
# the share of each earlier step's noise that is added to the mean of a later reward
DEPENDENCE = 0.5


def independent(_noises: list[Array], _rewards: list[Array], noise: Array) -> Array:
    """Return r_t = u_t."""
    return noise


def prefix_dependent(noises: list[Array], _rewards: list[Array], noise: Array) -> Array:
    """Return r_t = u_t + (u_1 + .. + u_{t-1}) / 2. A good step improves later steps."""
    return noise + DEPENDENCE * sum(noises)


def cancelling(_noises: list[Array], rewards: list[Array], noise: Array) -> Array:
    """Return r_t = u_t - (r_1 + .. + r_{t-1}). Each step takes back earlier gains (its covariance
    with the future is < 0)."""
    return noise - sum(rewards)


def negating(_noises: list[Array], rewards: list[Array], noise: Array) -> Array:
    """Return r_1 = u_1, then r_2 = -r_1, so that the return of two steps is always zero."""
    return noise if not rewards else np.broadcast_to(-rewards[-1], noise.shape)


def step_rewards(
    process: Process, horizon: int, size: int, groups: int, rng: np.random.Generator,
    followed: slice = slice(None),
) -> Array:  # fmt: skip
    """Draw step rewards, [steps, groups, size]. followed: the members of a group after which the
    next step is drawn; ``FIRST`` for k actions after one shared prefix, else each its own."""
    noises: list[Array] = []
    rewards: list[Array] = []
    drawn_rewards: list[Array] = []
    for _ in range(horizon):
        noise = NOISE[rng.integers(0, len(NOISE), size=(groups, size), dtype=np.int8)]
        drawn_rewards.append(process(noises, rewards, noise))
        noises.append(noise[:, followed])
        rewards.append(drawn_rewards[-1][:, followed])
    return np.stack(drawn_rewards)


def centred(values: Array) -> Array:
    """Return the values minus the mean of their group, [..., group]. Both advantages of Theorem 1
    have this form."""
    return values - values.mean(axis=-1, keepdims=True)


def variances(
    process: Process, horizon: int, k: int, group: int, groups: int, rng: np.random.Generator
) -> tuple[Array, float]:
    """Estimate the variance of the truncated advantage, [steps], and the variance of the
    full-trajectory advantage (eq. 8)."""
    truncated = centred(step_rewards(process, horizon, k, groups, rng, FIRST))
    full = centred(step_rewards(process, horizon, group, groups, rng).sum(axis=0))
    return (truncated**2).mean(axis=(1, 2)), float((full**2).mean())


def compared(
    statistic: Callable[[Array, float], ArrayLike], process: Process, horizon: int, k: int,
    group: int, rng: np.random.Generator, groups: int = 200_000,
) -> BatchEstimate:  # fmt: skip
    """Estimate a statistic of both ``variances``."""

    def of_batch(rng: np.random.Generator) -> ArrayLike:
        return statistic(*variances(process, horizon, k, group, groups // BATCHES, rng))

    return estimate(of_batch, rng)


def extended_variances(rng: np.random.Generator, groups: int = 200_000) -> BatchEstimate:
    """Estimate the truncated variance at step 2 of prefixes extended as SLATE extends them, and the
    full variance, [2].

    r_1 is +1 or -1 with equal probability. r_2 is +3 or -3 after r_1 = +1, and 0 after r_1 = -1.
    The continued candidate is drawn by softmax(A / 0.7) (SLATE Algorithm 1), so prefixes with r_1 =
    +1 are more frequent than under the policy.
    """

    def both(rng: np.random.Generator) -> list[float]:
        shape = (groups // BATCHES, GROUP)
        first, second = rng.choice((-1.0, 1.0), shape), rng.choice((-3.0, 3.0), shape)
        deviation = first.std(axis=1, ddof=1, keepdims=True)
        advantage = centred(first) / (deviation + 1e-6)
        # a draw from the softmax
        chosen = np.argmax(advantage / SELECTION + rng.gumbel(size=shape), axis=1)
        after = np.take_along_axis(first, chosen[:, None], axis=1) > 0
        truncated, full = centred(second * after), centred(first + second * (first > 0))
        return [float((truncated**2).mean()), float((full**2).mean())]

    return estimate(both, rng)


def chosen_share(k: int = GROUP) -> float:
    """Return the exact probability that SLATE continues a candidate of r_1 = +1 in
    ``extended_variances``."""
    share = 0.0
    for good in range(k + 1):
        rewards = np.repeat((1.0, -1.0), (good, k - good))
        weights = np.exp(centred(rewards) / (rewards.std(ddof=1) + 1e-6) / SELECTION)
        share += math.comb(k, good) / 2**k * float(weights[:good].sum() / weights.sum())
    return share


def rows(seed: int = 0) -> list[ClaimRow]:
    """Return SLATE's rows of methods.md 5."""
    rng = np.random.default_rng(seed)
    return [*_theorem_1(rng), _proposition_2(rng), _selection(rng)]


def _theorem_1(rng: np.random.Generator) -> list[ClaimRow]:
    inverse = [1 / horizon for horizon in HORIZONS]
    dependent = [
        1 / sum((1 + DEPENDENCE * later) ** 2 for later in range(horizon)) for horizon in HORIZONS
    ]

    def ratio(process: Process, horizon: int) -> BatchEstimate:
        return compared(lambda one, full: one.mean() / full, process, horizon, GROUP, GROUP, rng)

    results = []
    for claim, process, expected in (
        ("SLATE Thm 1: variance ratio at T=2/4/8, independent steps: 1/T", independent, inverse),
        ("SLATE Thm 1: the same, prefix-dependent means: below 1/T", prefix_dependent, dependent),
        ("SLATE Thm 1: the same, steps cancel the past: bound 1/T fails", cancelling, [1.0] * 3),
    ):
        ratios = stacked(ratio(process, horizon) for horizon in HORIZONS)
        results.append(drawn(claim, ratios, expected))
    claim = "SLATE Thm 1: r_2 = -r_1, truncated (step 1) and full variance: eq. 8 fails"
    expected = [(1 - 1 / GROUP) * NOISE.var(), 0]
    both = compared(lambda one, full: [one[0], full], negating, 2, GROUP, GROUP, rng)
    return [*results, drawn(claim, both, expected)]


def _selection(rng: np.random.Generator) -> ClaimRow:
    expected = [(1 - 1 / GROUP) * 9 * chosen_share(), (1 - 1 / GROUP) * (1 + 9 / 2)]
    claim = "prefixes extended by softmax(A / 0.7), truncated (step 2), full: eq. 8 fails"
    return drawn(f"SLATE Thm 1: {claim}", extended_variances(rng), expected)


def _proposition_2(rng: np.random.Generator) -> ClaimRow:
    cases = ((4, 20), (2, 10), (5, 50))

    def ratio(horizon: int, group: int) -> BatchEstimate:
        # of the means: (1/k) truncated over (1/G) full variance at k = G/T
        return compared(
            lambda one, full: one.mean() * horizon / full, independent, horizon, group // horizon,
            group, rng, 20_000,
        )  # fmt: skip

    expected = [(1 - horizon / group) / (1 - 1 / group) for horizon, group in cases]
    claim = "SLATE Prop 2: per-mean variance ratio at k=G/T, (T,G)=(4,20)/(2,10)/(5,50): below 1"
    return drawn(claim, stacked(ratio(*case) for case in cases), expected)
