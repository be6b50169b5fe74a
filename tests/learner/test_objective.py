"""What an update maximises: weights of tokens, changed rewards and advantages, trajectories that
were cut, and the KL to the initial and to the proximal policy."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from coppice.common.statistics import centre, within
from coppice.learner.config import AdaptiveKl, LearnerConfig, SoftOverlong
from coppice.learner.model import checkpoint
from coppice.learner.update.corrections import kl
from coppice.learner.update.objective import Aggregation, overlong, shaped, token_weights
from coppice.learner.update.plan import plan_of
from coppice.learner.update.policy_step import Objective
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trainer import Trainer
from coppice.learner.update.trainer import adapted_kl as adapted
from tests.learner.conftest import Make
from tests.learner.tables import NO, made_of
from tests.updates import batch, changed, episodes, everything, rescored, table_of


def tabled(tokens: list[int], *columns: list[int]) -> TurnTable:
    """columns: group, trajectory and tree of each turn."""
    group, trajectory, tree = map(np.array, columns)
    return TurnTable(tree, group, trajectory, np.ones(len(tokens)), np.array(tokens), {})


def test_slate_weights_are_means_over_tokens_candidates_and_questions_summed_over_steps() -> None:
    # Question 0 has two steps of two candidates, question 1 one step.
    t = tabled([2, 4, 1, 1, 3, 5], [0, 0, 1, 1, 2, 2], [0, 1] * 3, [0, 0, 0, 0, 1, 1])
    weights = token_weights(t, t.mask(), "turn")
    # 1/k * 1/questions each, so each step of a question sums to 1/2
    assert_allclose(t.per_turn(weights), [0.25] * 6)
    assert_allclose(weights[:2], 0.125)


def test_trajectory_weights_are_token_mean_over_a_whole_trajectory() -> None:
    t = tabled([2, 4, 3, 3], [0] * 4, [0, 0, 1, 1], [0] * 4)
    assert_allclose(token_weights(t, t.mask(), "trajectory"), [1 / 12] * 12)


@pytest.mark.parametrize("aggregation", ["turn", "trajectory", "constant"])
def test_the_leaves_of_several_trees_of_a_question_weigh_the_same(aggregation: Aggregation) -> None:
    t = tabled([2, 2, 2, 2], [0, 0, 0, 1], [0, 1, 2, 0], [7] * 4)  # trees of three leaves and one
    weights = token_weights(t, t.mask(), aggregation, constant_tokens=2, steps=False)
    assert_allclose(weights, [1 / 8] * 8)


@pytest.mark.parametrize("aggregation", ["turn", "trajectory", "token", "constant"])
def test_a_question_without_outcomes_leaves_the_others_alone(aggregation: Aggregation) -> None:
    both = tabled([2, 4, 3, 3], [0, 0, 1, 1], [0, 1, 0, 1], [7, 7, 9, 9])
    lost, alone = (
        token_weights(t, t.mask(), aggregation, constant_tokens=8)
        for t in (both.only(both.tree == 7), tabled([2, 4], [0, 0], [0, 1], [7, 7]))
    )
    np.testing.assert_array_equal(lost, alone)


def test_auto_is_the_aggregation_of_the_schemes_source_unless_the_correction_has_one() -> None:
    def auto(scheme: str, **settings: Any) -> str:
        return plan_of(LearnerConfig(scheme=scheme, **settings)).aggregation

    assert (auto("slate"), auto("grpo"), auto("turn_grpo")) == ("turn", "trajectory", "token")
    assert auto("slate", correction="gspo") == auto("turn_grpo", correction="gspo") == "trajectory"
    assert auto("grpo", correction="gspo", aggregation="token") == "token"


def test_k3_of_a_policy_that_left_the_reference_far_behind_has_a_finite_gradient() -> None:
    current = torch.tensor([-120.0, -1.0], requires_grad=True)
    kl("k3", current, torch.tensor([-1.0, -120.0])).sum().backward()
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()


def two_trajectories(**columns: list[float]) -> TurnTable:
    return made_of([2, 2], columns, tokens=[2, 3, 1, 4])


def seen(made: Trainer, some: Any) -> tuple[Objective, dict[str, float]]:
    """The objective of the first optimizer step of an update, and the update's metrics."""
    known: list[Objective] = []
    step = made.policy_step.step

    def noting(first: Objective, *rest: Any) -> dict[str, float]:
        known.append(first)
        return step(first, *rest)

    made.policy_step.step = noting  # pyright: ignore[reportAttributeAccessIssue]
    metrics = made.update(some)
    return known[0], metrics


def test_the_soft_overlong_punishment_is_that_of_dapo() -> None:
    # L_max = 100, L_cache = 20: nothing up to 80, (80 - |y|) / 20 up to 100, then -1
    lengths = np.array([10, 80, 85, 90, 100, 300])
    assert overlong(lengths, 100, 20).tolist() == [0, 0, 0.25, 0.5, 1, 1]


def test_a_penalty_is_charged_to_the_first_score_at_its_turn_or_later() -> None:
    table = two_trajectories(reward=[NO, 1.0, 2.0, 3.0])
    kl = table.at_last_token(np.array([0.5, 0.25, 0.125, 1.0]))
    table = msgspec.structs.replace(table, token_scores={"kl": kl})
    charged = shaped(table, "reward", LearnerConfig(kl_reward_coef=1.0)).column("reward")
    np.testing.assert_array_equal(charged, [NO, 0.25, 1.875, 2.0])


def test_the_reward_is_scaled_then_clipped_and_the_penalties_come_after() -> None:
    table = two_trajectories(reward=[0.1, 0.4, -3.0, NO])
    config = LearnerConfig(
        reward_scale=2.0, reward_clip=0.5, soft_overlong=SoftOverlong(max_tokens=4, cache_tokens=2)
    )
    changed = shaped(table, "reward", config).column("reward")
    assert_allclose(changed, [0.2, 0.0, -0.5, NO])


def test_k1_in_the_reward_is_the_log_ratio_of_the_samples(make: Make) -> None:
    settings: dict[str, Any] = {"kl_coef": 0.0, "scheme": "grpo", "scheme_options": {"std": False}}
    some = episodes(0, 0)
    before, after = (
        seen(make(**settings, kl_reward_coef=coefficient), some)[0] for coefficient in (0.0, 0.25)
    )
    assert after.reference is not None
    table = table_of(some)
    kl = table.per_turn(after.rows.behaviour - after.reference)
    trajectories = table.trajectories()
    centred = within(trajectories.tree, trajectories.total(kl), centre)[trajectories.of]
    gap = after.advantages - before.advantages
    assert_allclose(gap, -0.25 * table.per_token(centred), atol=1e-4)


def test_advantages_are_scaled_then_clipped(make: Make) -> None:
    scaling = make(advantage_scale=2.0, advantage_clip=1.5)
    plain, changed = (seen(one, batch(0, 0))[0].advantages for one in (make(), scaling))
    assert np.abs(plain).max() > 0.75
    assert_allclose(changed, np.clip(2 * plain, -1.5, 1.5), rtol=1e-6)


def test_a_trajectory_with_a_cut_action_carries_no_loss_but_is_still_compared(make: Make) -> None:
    some = episodes(0, 0, turns=3)
    cut = some.groups[1].turns[0]
    some = rescored(some, lambda turn: turn.scores | {"truncated": float(turn is cut)})
    settings: dict[str, Any] = {"scheme": "grpo", "scheme_options": {"column": "outcome"}}
    settings |= {"aggregation": "token"}
    (whole, _), (objective, metrics) = (
        seen(make(overlong_filter=on, **settings), some) for on in (False, True)
    )
    table = table_of(some)
    out = table.per_token((table.group == some.groups[1].id) & (table.trajectory == cut.trajectory))
    assert out.any()
    assert not objective.weights[out].any()
    np.testing.assert_array_equal(objective.advantages, whole.advantages)
    assert_allclose(objective.weights[~out], 1 / (~out).sum(), rtol=1e-6)
    assert metrics["learner/trained_tokens"] == (~out).sum()
    assert metrics["score/truncated"] == pytest.approx(1 / len(table))


def test_over_the_vocabulary_k1_and_k3_are_the_kl_and_each_has_its_gradient() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.1]).log_softmax(0)
    current = logits.log_softmax(0)
    probability = current.exp()
    reverse = (probability * (current - reference)).sum()
    forward = (reference.exp() * (reference - current)).sum()
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


def test_the_adaptive_factor_scales_the_next_update_and_lasts(tmp_path: Path, make: Make) -> None:
    settings: dict[str, Any] = {"kl_coef": 0.5, "adaptive_kl": {"target": 1e-9, "horizon": 90}}
    adaptive, plain = make(**settings), make(kl_coef=0.5)
    for made in (adaptive, plain):
        made.update(batch(0, 0))
    assert not changed(everything(adaptive), everything(plain))
    # At first the policy is its own reference: the KL is 0, so the factor falls by .2 x 9
    # trajectories / 90.
    assert adaptive.kl_factor == pytest.approx(0.98)
    metrics = adaptive.update(batch(1, 1))
    plain.update(batch(1, 1))
    assert metrics["learner/kl_factor"] == pytest.approx(0.98)
    assert adaptive.kl_factor == pytest.approx(0.98 * 1.02)
    assert changed(everything(adaptive), everything(plain))
    resumed = make(**settings)
    checkpoint.restore(resumed, checkpoint.save(adaptive, tmp_path, [], 3))
    assert resumed.kl_factor == adaptive.kl_factor


def test_steps_beyond_the_target_kl_are_left_out_and_counted(make: Make) -> None:
    one, stopping, unbounded = (
        make(kl_coef=0.0, epochs=epochs, target_kl=target)
        for epochs, target in ((1, 0.0), (4, 1e-4), (4, 1e9))
    )
    one.update(batch(0, 0))
    metrics = stopping.update(batch(0, 0))
    assert metrics["learner/stopped_steps"] == 3
    assert metrics["learner/proximal_kl"] > 1e-4
    assert metrics["learner/grad_norm"] > 0
    assert not changed(everything(stopping), everything(one))
    assert all(p.grad is None for p in stopping.policy.trained().values())
    assert unbounded.update(batch(0, 0))["learner/stopped_steps"] == 0
    assert stopping.version == unbounded.version == 1
