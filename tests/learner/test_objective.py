"""Weights of the objective and the off-policy correction."""

from typing import Any

import numpy as np
import pytest
import torch

from coppice.learner.config import LearnerConfig
from coppice.learner.update.corrections import Logprobs, k3, none, ppo_clip
from coppice.learner.update.objective import Aggregation, token_weights
from coppice.learner.update.plan import plan_of
from coppice.learner.update.table import TurnTable, TurnTokens


def batch(
    tokens: list[int], group: list[int], trajectory: list[int], tree: list[int]
) -> tuple[TurnTable, list[TurnTokens]]:
    n = len(tokens)
    t = TurnTable(
        np.array(tree), np.array(group), np.array(trajectory), np.ones(n), np.array(tokens), {}
    )
    turns = [
        TurnTokens(np.array([1]), np.array([2] * k), np.zeros(k), np.zeros(k), np.ones(k, bool))
        for k in tokens
    ]
    return t, turns


def sampled(turns: list[TurnTokens]) -> np.ndarray:
    return np.concatenate([turn.sampled for turn in turns])


def test_slate_weights_are_token_mean_then_mean_over_candidates_then_sum_over_steps_then_mean_over_questions() -> (
    None
):
    # Question 0 has two steps of two candidates, question 1 one step.
    t, turns = batch([2, 4, 1, 1, 3, 5], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1])
    weights = token_weights(t, sampled(turns), "turn")
    sums = [w.sum() for w in np.split(weights, np.cumsum(t.tokens)[:-1])]
    # 1/k * 1/questions each, so each step of a question sums to 1/2
    np.testing.assert_allclose(sums, [0.25] * 6)
    np.testing.assert_allclose(weights[:2], 0.125)
    halved = token_weights(t, sampled(turns), "turn", mean_over_steps=True)
    np.testing.assert_allclose(halved[:2], 0.0625)


def test_trajectory_weights_are_token_mean_over_a_whole_trajectory() -> None:
    t, turns = batch([2, 4, 3, 3], [0] * 4, [0, 0, 1, 1], [0] * 4)
    np.testing.assert_allclose(token_weights(t, sampled(turns), "trajectory"), [1 / 12] * 12)


def test_forced_tokens_weigh_nothing_and_do_not_dilute_the_others() -> None:
    t, _ = batch([4], [0], [0], [0])
    forced = TurnTokens(
        np.array([1]),
        np.array([2] * 4),
        np.zeros(4),
        np.zeros(4),
        np.array([True, False, False, True]),
    )
    assert token_weights(t, sampled([forced]), "turn").tolist() == [0.5, 0, 0, 0.5]


@pytest.mark.parametrize("aggregation", ["turn", "trajectory", "token", "constant"])
def test_a_question_that_lost_all_its_outcomes_leaves_the_others_as_without_it(
    aggregation: Aggregation,
) -> None:
    both, turns = batch([2, 4, 3, 3], [0, 0, 1, 1], [0, 1, 0, 1], [7, 7, 9, 9])
    lost = both.only(np.array([True, True, False, False]))
    alone, own = batch([2, 4], [0, 0], [0, 1], [7, 7])
    weights = token_weights(lost, sampled(turns[:2]), aggregation, constant_tokens=8)
    np.testing.assert_array_equal(
        weights, token_weights(alone, sampled(own), aggregation, constant_tokens=8)
    )


def test_auto_is_the_aggregation_of_the_scheme_s_source_unless_the_correction_declares_one() -> (
    None
):
    def auto(scheme: str, **settings: Any) -> str:
        return plan_of(LearnerConfig(scheme=scheme, **settings)).aggregation

    assert (auto("slate"), auto("grpo"), auto("turn_grpo")) == ("turn", "trajectory", "token")
    assert {auto(scheme, correction="gspo") for scheme in ("slate", "grpo", "turn_grpo")} == {
        "trajectory"
    }
    assert auto("grpo", correction="gspo", aggregation="token") == "token"


def test_the_weight_of_a_trajectory_does_not_grow_with_its_turns_under_grpo() -> None:
    t, turns = batch([2, 4, 3, 5], [0] * 4, [0, 0, 0, 1], [0] * 4)  # three turns, and one
    weights = token_weights(t, sampled(turns), plan_of(LearnerConfig(scheme="grpo")).aggregation)
    assert weights[:9].sum() == pytest.approx(weights[9:].sum())


def test_on_policy_the_clipped_and_the_plain_surrogate_have_the_same_gradient() -> None:
    behaviour, advantage = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, -2.0, 0.5])
    gradients = []
    for correction in (none, ppo_clip):
        current = behaviour.clone().requires_grad_()
        correction(Logprobs(current, behaviour, behaviour), advantage).term.sum().backward()
        gradients.append(current.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], advantage)


def test_clipping_stops_the_gradient_only_where_it_would_move_further_away() -> None:
    current = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    made = ppo_clip(
        Logprobs(current, torch.zeros(4), torch.zeros(4)), advantage, clip_low=0.2, clip_high=0.3
    )
    made.term.sum().backward()
    assert made.clipped.tolist() == [True, False, False, True]
    assert current.grad is not None
    assert (current.grad != 0).tolist() == [False, True, True, False]
    np.testing.assert_allclose(made.term.detach()[[0, 3]], [1.3, -0.8], atol=1e-6)


def test_k3_is_zero_on_equal_policies_positive_elsewhere_and_clamped() -> None:
    same, far = torch.tensor([-1.0]), torch.tensor([-40.0])
    assert k3(same, same).item() == 0
    assert k3(same, same + 0.1).item() > 0
    assert k3(far, same).item() == 10


def test_k3_of_a_policy_that_left_the_reference_far_behind_has_a_finite_gradient() -> None:
    current = torch.tensor([-120.0, -1.0], requires_grad=True)
    k3(current, torch.tensor([-1.0, -120.0])).sum().backward()
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()
