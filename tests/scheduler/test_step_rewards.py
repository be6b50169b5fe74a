"""Known answers of methods.md 5 and the rules of 1.1 to 1.4."""

import random

import numpy as np
import pytest

from coppice.common.statistics import among_siblings
from coppice.scheduler.growth.rewards import choose, composite, selection


def advantages(rewards: list[float]) -> list[float]:
    return among_siblings(np.array(rewards, float)).tolist()


def test_slate_known_answer_of_advantages_and_selection() -> None:
    made = advantages([2, 1, 0, 0, -2])
    np.testing.assert_allclose(made, [1.2136, 0.5394, -0.1348, -0.1348, -1.4832], atol=1e-4)
    np.testing.assert_allclose(
        selection(made, 0.7), [0.5902, 0.2253, 0.0860, 0.0860, 0.0125], atol=1e-4
    )


def test_choices_follow_the_selection_probabilities() -> None:
    rng, scores = random.Random(0), advantages([2, 1, 0, 0, -2])
    counts = np.bincount(
        [choose(scores, range(5), "reward-weighted", 0.7, rng) for _ in range(20000)], minlength=5
    )
    np.testing.assert_allclose(counts / 20000, selection(scores, 0.7), atol=0.012)


def test_best_of_k_takes_the_best_allowed() -> None:
    assert choose([0.1, 3, 2], [0, 2], "best-of-k", 0.7, random.Random(0)) == 2


def test_candidates_that_are_not_allowed_are_never_chosen() -> None:
    rng = random.Random(1)
    assert {choose([9, 0, 0], [1, 2], "reward-weighted", 0.7, rng) for _ in range(200)} == {1, 2}


@pytest.mark.parametrize(("step", "bonus"), [(1, 0.075), (2, 0.05), (4, 0.0), (9, 0.0)])
def test_the_early_answer_bonus_counts_steps_from_one(step: int, bonus: float) -> None:
    assert composite({"think": 1, "answer": 1}, True, step, 4, 0.1) == pytest.approx(2 + bonus)


def test_a_search_gets_no_bonus_and_an_invalid_component_adds_nothing() -> None:
    assert composite({"think": -1, "query": 1}, False, 1, 4, 0.1) == 0
    assert composite({"query": 1}, False, 1, 4, 0.1) == 1
