"""The KL to the initial policy and to the proximal policy: estimators, adaptive coefficient, early
stop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.learner.config import AdaptiveKl
from coppice.learner.model import checkpoint
from coppice.learner.update.corrections import kl
from coppice.learner.update.trainer import adapted_kl as adapted
from tests.updates import batch, state, trainer


def test_over_the_vocabulary_k1_and_k3_are_the_kl_and_each_has_its_gradient() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.1]).log_softmax(0)
    current = logits.log_softmax(0)
    probability = current.exp()
    reverse, forward = (
        (probability * (current - reference)).sum(),
        (reference.exp() * (reference - current)).sum(),
    )
    for estimator in ("k1", "k3"):
        value = (probability * kl(estimator, current, reference)).sum()
        torch.testing.assert_close(value, reverse)
    gradients = {"k1": torch.zeros(3)}
    (gradients["k2"],) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (gradients["k3"],) = torch.autograd.grad(forward, logits, retain_graph=True)
    for estimator, expected in gradients.items():
        loss = (probability.detach() * kl(estimator, current, reference)).sum()  # pyright: ignore
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_adaptive_factor_follows_the_error_within_a_fifth() -> None:
    config = AdaptiveKl(target=0.1, horizon=1000)
    assert adapted(2.0, 0.11, config, 500) == pytest.approx(2.0 * (1 + 0.1 * 0.5))
    assert adapted(2.0, 5.0, config, 500) == pytest.approx(2.0 * 1.1)
    assert adapted(2.0, 0.0, config, 500) == pytest.approx(2.0 * 0.9)
    assert adapted(2.0, 0.1, config, 500) == 2.0
    assert adapted(2.0, 0.0, config, 10**6) == pytest.approx(1.6)


def test_the_adaptive_factor_scales_the_next_update_and_lasts(tmp_path: Path, llama: Path) -> None:
    settings: dict[str, Any] = {"kl_coef": 0.5, "adaptive_kl": {"target": 1e-9, "horizon": 90}}
    adaptive, plain = (
        trainer(llama, tmp_path, **some) for some in (settings, dict[str, Any](kl_coef=0.5))
    )
    for made in (adaptive, plain):
        made.update(batch(0, 0))
    assert all(torch.equal(value, state(plain)[name]) for name, value in state(adaptive).items())
    # At first the policy is its own reference: the KL is 0, so the factor falls by .2 x 9
    # trajectories / 90.
    assert adaptive.kl_factor == pytest.approx(0.98)
    metrics = adaptive.update(batch(1, 1))
    plain.update(batch(1, 1))
    assert metrics["learner/kl_factor"] == pytest.approx(0.98)
    assert adaptive.kl_factor == pytest.approx(0.98 * 1.02)
    assert any(
        not torch.equal(value, state(plain)[name]) for name, value in state(adaptive).items()
    )
    resumed = trainer(llama, tmp_path, **settings)
    checkpoint.restore(resumed, checkpoint.save(adaptive, tmp_path, {}, 3))
    assert resumed.kl_factor == adaptive.kl_factor


def test_steps_beyond_the_target_kl_are_left_out_and_counted(tmp_path: Path, llama: Path) -> None:
    one, stopping, unbounded = (
        trainer(llama, tmp_path, kl_coef=0.0, **some)
        for some in (
            {"epochs": 1}, {"epochs": 4, "target_kl": 1e-4}, {"epochs": 4, "target_kl": 1e9},
        )
    )  # fmt: skip
    one.update(batch(0, 0))
    metrics = stopping.update(batch(0, 0))
    assert metrics["learner/stopped_steps"] == 3
    assert metrics["learner/proximal_kl"] > 1e-4
    assert metrics["learner/grad_norm"] > 0
    assert all(torch.equal(value, state(one)[name]) for name, value in state(stopping).items())
    assert all(p.grad is None for p in stopping.policy.trained().values())
    assert unbounded.update(batch(0, 0))["learner/stopped_steps"] == 0
    assert stopping.version == unbounded.version == 1
