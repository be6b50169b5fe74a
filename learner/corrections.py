"""Off-policy corrections: pure functions of log-probabilities and advantages, per token.

current: the policy being trained (with gradient); behaviour: the policy that sampled the token, as the engine recorded it.
Each returns the surrogate to maximise [tokens] and a boolean [tokens] of where it was clipped.
"""

from collections.abc import Callable

import torch

Surrogate = tuple[torch.Tensor, torch.Tensor]
Correction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], Surrogate]


def none(
    current: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """r' A with r' = exp(current - stop_gradient(current)) = 1: the policy gradient as if the data were on-policy."""
    ratio = torch.exp(current - current.detach())
    return ratio * advantage, torch.zeros_like(advantage, dtype=torch.bool)


def ppo_clip(
    current: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(current - behaviour) (methods.md 1.2)."""
    ratio = torch.exp(current - behaviour)
    plain = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return torch.minimum(plain, clipped), clipped < plain


CORRECTIONS: dict[str, Correction] = {"none": none, "ppo_clip": ppo_clip}


def k3(current: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(current || reference) per token: exp(d) - d - 1, d = reference - current; clamped to [-10, 10]."""
    d = (reference - current).clamp(-20, 20)  # beyond the clamp of the result: only keeps exp, and its gradient, finite
    return (torch.exp(d) - d - 1).clamp(-10, 10)
