"""GAE, V-trace and Retrace against their definitions written as explicit sums."""

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from coppice.learner.update.targets import gae, retrace, vtrace


class Trajectory(NamedTuple):
    """Rewards, values and log-ratios, each [tokens], with discount and lambda."""

    rewards: np.ndarray
    values: np.ndarray
    log_ratio: np.ndarray
    gamma: float
    lam: float

    def value(self, i: int) -> float:
        return float(self.values[i]) if i < len(self.values) else 0.0

    def delta(self, i: int) -> float:
        return float(self.rewards[i]) + self.gamma * self.value(i + 1) - self.value(i)


def number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, width=32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(1, 8))
    rewards, values, log_ratio = (
        np.array(draw(st.lists(number(-b, b), min_size=n, max_size=n)), np.float64)
        for b in (2, 2, 1.5)
    )
    return Trajectory(rewards, values, log_ratio, draw(number(0, 1)), draw(number(0, 1)))


@settings(max_examples=50, deadline=None)
@given(trajectories())
def test_gae_is_the_double_sum_of_discounted_temporal_differences(t: Trajectory) -> None:
    made, returns = gae(t.rewards, t.values, t.gamma, t.lam)
    n = len(made)
    expected = [
        sum((t.gamma * t.lam) ** (k - i) * t.delta(k) for k in range(i, n)) for i in range(n)
    ]
    assert_allclose(made, expected, atol=1e-9)
    assert_allclose(returns, made + t.values, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(trajectories(), number(1, 3), number(0.5, 1))
def test_vtrace_is_the_definition_of_its_paper(t: Trajectory, rho_max: float, c_max: float) -> None:
    # Espeholt et al. 2018, eq. 1: v_s = V_s + sum_t gamma^(t-s) (c_s ... c_(t-1)) rho_t delta_t;
    # remark 2: lambda in c
    advantages, targets = vtrace(t.rewards, t.values, t.log_ratio, t.gamma, t.lam, rho_max, c_max)
    n, ratio = len(targets), np.exp(t.log_ratio)
    expected = []
    for s in range(n):
        total = t.value(s)
        for k in range(s, n):
            product = 1.0
            for i in range(s, k):
                product *= t.lam * min(c_max, float(ratio[i]))
            total += t.gamma ** (k - s) * product * min(rho_max, float(ratio[k])) * t.delta(k)
        expected.append(total)
    assert_allclose(targets, expected, atol=1e-9)
    ahead = [*expected[1:], 0.0]
    by_paper = [float(t.rewards[s]) + t.gamma * ahead[s] - t.value(s) for s in range(n)]
    assert_allclose(advantages, by_paper, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(trajectories())
def test_retrace_is_the_sum_of_its_paper_over_traces_cut_at_one(t: Trajectory) -> None:
    # Munos et al. 2016, eq. 3 with V for Q and its expectation: sum_k gamma^(k-s) (c_(s+1) ... c_k)
    # delta_k
    advantages, targets = retrace(t.rewards, t.values, t.log_ratio, t.gamma, t.lam)
    n, cut = len(targets), [min(1.0, float(r)) for r in np.exp(t.log_ratio)]
    expected = [
        sum(
            (t.gamma * t.lam) ** (k - s) * float(np.prod(cut[s + 1 : k + 1])) * t.delta(k)
            for k in range(s, n)
        )
        for s in range(n)
    ]
    assert_allclose(advantages, expected, atol=1e-9)
    assert_allclose(targets, t.values + np.array(cut) * expected, atol=1e-9)


def test_ratios_too_large_for_a_float_are_cut_like_any_other() -> None:
    rewards, values, far = np.ones(3), np.zeros(3), np.array([900.0, 900, 900])
    with np.errstate(over="ignore"):
        made = [vtrace(rewards, values, far, 1.0, 1.0), retrace(rewards, values, far, 1.0, 1.0)]
    assert_allclose(made, [[[3, 2, 1]] * 2] * 2)
