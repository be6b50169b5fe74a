"""The KL to the initial policy: estimators of its loss term, and PPO's adaptive coefficient.

With d = log current - log reference on sampled tokens: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
(Schulman 2020, "Approximating KL divergence"). On-policy, k1 and k3 are unbiased values of
KL(current || reference). As loss terms, k2 has the gradient of this KL, k3 that of KL(reference ||
current), and k1 a gradient that is 0 in expectation; k1 belongs in the reward (learner/update/rewards.py).
"""

from typing import Literal

from torch import Tensor

from coppice.learner.config import AdaptiveKl
from coppice.learner.update.corrections import k3

Estimator = Literal["k1", "k2", "k3"]


def estimated(estimator: Estimator, current: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate of KL(current || reference) per token [tokens], with gradient."""
    if estimator == "k3":
        return k3(current, reference)
    difference = (current - reference).clamp(-20, 20)  # the bound of k3
    return difference if estimator == "k1" else difference**2 / 2


def adapted(factor: float, kl: float, config: AdaptiveKl, trajectories: int) -> float:
    """Return the next factor of the KL's coefficients, factor x (1 + clip(kl / target - 1, -0.2,
    0.2) x trajectories / horizon) (Ziegler et al. 2019, in the form of their released code). kl:
    nats per token in the update just made, which had this many trajectories; more trajectories than
    the horizon count as the horizon."""
    error = min(0.2, max(-0.2, kl / config.target - 1))
    return factor * (1 + error * min(1.0, trajectories / config.horizon))
