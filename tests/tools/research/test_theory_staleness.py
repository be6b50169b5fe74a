"""The corrections under stale data: exact gradients and moments of a small task; a test's name is
what was found."""

import numpy as np
import pytest
import torch

from coppice.learner.update.corrections import CORRECTIONS, LEVELS, Logprobs, load
from coppice.research.theories import differences, staleness
from coppice.research.theories.staleness import (
    EXACT,
    Stale,
    TokenTask,
    average,
    chances,
    log_probs,
    measure,
    off_policy,
    stale,
)

EVERY = [(name, level) for name in CORRECTIONS for level in LEVELS]


@pytest.fixture
def tasks() -> list[TokenTask]:
    rng = np.random.default_rng(3)
    return [staleness.random_task(rng) for _ in range(3)]


@pytest.fixture
def old(tasks: list[TokenTask]) -> Stale:
    return stale(tasks, 8)


def test_the_exact_gradient_is_that_of_the_mean_return(old: Stale) -> None:
    for task, logits in old:
        numeric = differences(lambda at, task=task: float(chances(at) @ task.returns), logits)
        assert staleness.exact_gradient(task, logits) == pytest.approx(numeric, abs=1e-9)


def test_the_estimators_mean_is_the_gradient_of_the_expected_surrogate(old: Stale) -> None:
    task, logits = old[0]
    correction, (states, actions) = load("icepop", {}), staleness.paths()
    leaf = torch.from_numpy(logits).requires_grad_()
    with torch.enable_grad():
        current = torch.log_softmax(leaf, dim=-1)[
            torch.from_numpy(states), torch.from_numpy(actions)
        ].flatten()
        behaviour = torch.from_numpy(log_probs(task.behaviour).ravel())
        chance = torch.from_numpy(chances(task.behaviour)).repeat_interleave(staleness.TOKENS)
        advantages = torch.from_numpy(task.returns).repeat_interleave(staleness.TOKENS)
        found = correction(Logprobs(current, current.detach(), behaviour), advantages)
        (gradient,) = torch.autograd.grad((chance * found.term).sum(), leaf)
    each = np.repeat(task.returns[:, None], staleness.TOKENS, axis=1)
    weights = staleness.token_weights(
        correction, log_probs(logits), log_probs(task.behaviour), each
    )
    mean = np.tensordot(chances(task.behaviour), staleness.estimates(logits, weights), axes=1)
    assert mean == pytest.approx(gradient.numpy(), abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), EVERY)
def test_every_correction_at_every_level_is_unbiased_without_staleness(
    name: str, level: str, tasks: list[TokenTask]
) -> None:
    fresh = stale(tasks, 0)
    found, plain = average(fresh, load(name, {"level": level})), average(fresh, load("none", {}))
    assert found.bias < EXACT
    assert found.deviation == pytest.approx(plain.deviation)


@pytest.mark.parametrize("steps", staleness.STALENESS)
def test_the_untruncated_sequence_ratio_is_unbiased_at_every_staleness(
    steps: int, tasks: list[TokenTask]
) -> None:
    found = average(stale(tasks, steps), staleness.UNBIASED)
    assert found.bias < EXACT
    assert found.cosine == pytest.approx(1)


def test_the_untruncated_sequence_ratio_is_unbiased_with_any_constant_baseline(old: Stale) -> None:
    for task, logits in old:
        shifted = np.repeat(task.returns[:, None] - 0.3, staleness.TOKENS, axis=1)
        assert measure(task, logits, staleness.UNBIASED, shifted).bias < EXACT


@pytest.mark.parametrize(
    ("name", "same"), [("tis", "aipo"), ("decoupled", "sequence_mask"), ("icepop", "sequence_mask")]
)
def test_when_an_update_begins_a_clip_around_its_policy_is_idle(
    name: str, same: str, old: Stale
) -> None:
    options = {"upper": 1.5} | ({"lower": 0.5} if name == "icepop" else {})
    found, direct = (
        average(old, load(name, options)),
        average(old, load(same, {"level": "token", **options})),
    )
    assert (found.bias, found.deviation) == pytest.approx((direct.bias, direct.deviation))


def test_vtrace_without_bounds_gives_the_values_of_the_current_policy_from_any_critic(
    old: Stale,
) -> None:
    for task, logits in old:
        critic = staleness.given_prefix(
            task.behaviour, np.random.default_rng(0).normal(size=log_probs(logits).shape)
        )
        _, targets = off_policy(task, logits, "vtrace", critic)
        assert staleness.given_prefix(task.behaviour, targets) == pytest.approx(
            staleness.values(task, logits)
        )


def test_retrace_from_state_values_is_vtrace_with_both_bounds_one(old: Stale) -> None:
    for task, logits in old:
        made, same = (
            off_policy(task, logits, "retrace"),
            off_policy(task, logits, "vtrace", rho_max=1.0, c_max=1.0),
        )
        assert made[0] == pytest.approx(same[0])
        assert made[1] == pytest.approx(same[1])


@pytest.mark.slow
def test_every_row_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "TASKS", 5)
    assert [row.claim for row in staleness.rows() if not row.agrees] == []
