"""Weights of the objective and the off-policy correction."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from coppice.learner.config import LearnerConfig
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.update.corrections import kl
from coppice.learner.update.objective import Aggregation, token_weights
from coppice.learner.update.plan import plan_of
from coppice.learner.update.table import TurnTable
from tests.learner.tables import acted


def batch(
    tokens: list[int], group: list[int], trajectory: list[int], tree: list[int]
) -> tuple[TurnTable, list[Tokens]]:
    n = len(tokens)
    t = TurnTable(
        np.array(tree), np.array(group), np.array(trajectory), np.ones(n), np.array(tokens), {}
    )
    turns = [acted([1], [2] * k) for k in tokens]
    return t, turns


def sampled(turns: list[Tokens]) -> np.ndarray:
    return np.concatenate([turn.sampled for turn in turns])


def test_slate_weights_are_means_over_tokens_candidates_and_questions_summed_over_steps() -> None:
    # Question 0 has two steps of two candidates, question 1 one step.
    t, turns = batch([2, 4, 1, 1, 3, 5], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1])
    weights = token_weights(t, sampled(turns), "turn")
    sums = [w.sum() for w in np.split(weights, np.cumsum(t.tokens)[:-1])]
    # 1/k * 1/questions each, so each step of a question sums to 1/2
    assert_allclose(sums, [0.25] * 6)
    assert_allclose(weights[:2], 0.125)


def test_trajectory_weights_are_token_mean_over_a_whole_trajectory() -> None:
    t, turns = batch([2, 4, 3, 3], [0] * 4, [0, 0, 1, 1], [0] * 4)
    assert_allclose(token_weights(t, sampled(turns), "trajectory"), [1 / 12] * 12)


def test_forced_tokens_weigh_nothing_and_do_not_dilute_the_others() -> None:
    t, _ = batch([4], [0], [0], [0])
    forced = acted([1], [2] * 4, sampled=[True, False, False, True])
    assert token_weights(t, sampled([forced]), "turn").tolist() == [0.5, 0, 0, 0.5]


@pytest.mark.parametrize("aggregation", ["turn", "trajectory", "token", "constant"])
def test_a_question_without_outcomes_leaves_the_others_alone(aggregation: Aggregation) -> None:
    both, turns = batch([2, 4, 3, 3], [0, 0, 1, 1], [0, 1, 0, 1], [7, 7, 9, 9])
    lost = both.only(np.array([True, True, False, False]))
    alone, own = batch([2, 4], [0, 0], [0, 1], [7, 7])
    weights = token_weights(lost, sampled(turns[:2]), aggregation, constant_tokens=8)
    np.testing.assert_array_equal(
        weights, token_weights(alone, sampled(own), aggregation, constant_tokens=8)
    )


def test_auto_is_the_aggregation_of_the_schemes_source_unless_the_correction_has_one() -> None:
    def auto(scheme: str, **settings: Any) -> str:
        return plan_of(LearnerConfig(scheme=scheme, **settings)).aggregation

    assert (auto("slate"), auto("grpo"), auto("turn_grpo")) == ("turn", "trajectory", "token")
    assert {auto(scheme, correction="gspo") for scheme in ("slate", "grpo", "turn_grpo")} == {
        "trajectory"
    }
    assert auto("grpo", correction="gspo", aggregation="token") == "token"


def test_k3_of_a_policy_that_left_the_reference_far_behind_has_a_finite_gradient() -> None:
    current = torch.tensor([-120.0, -1.0], requires_grad=True)
    kl("k3", current, torch.tensor([-1.0, -120.0])).sum().backward()
    assert current.grad is not None
    assert torch.isfinite(current.grad).all()
