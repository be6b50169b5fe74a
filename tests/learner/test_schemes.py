"""Known answers of methods.md 5."""

import numpy as np
import pytest

from learner import schemes
from learner.schemes import grpo, slate
from learner.table import TurnTable


def table(reward: list[float], group: list[int], trajectory: list[int], tree: list[int] | None = None) -> TurnTable:
    n = len(reward)
    return TurnTable(
        tree=np.array(tree or [0] * n),
        group=np.array(group),
        trajectory=np.array(trajectory),
        turn=np.ones(n, np.int64),
        tokens=np.arange(1, n + 1),
        scores={"reward": np.array(reward, np.float64)},
    )


def by_turn(made: np.ndarray, t: TurnTable) -> np.ndarray:
    ends = np.cumsum(t.tokens)
    return made[ends - 1]


def test_slate_known_answer_with_the_sample_standard_deviation() -> None:
    t = table([2, 1, 0, 0, -2], [0] * 5, list(range(5)))
    np.testing.assert_allclose(by_turn(slate.advantages(t), t), [1.2136, 0.5394, -0.1348, -0.1348, -1.4832], atol=1e-4)


def test_slate_known_answer_with_the_population_standard_deviation() -> None:
    t = table([2, 1, 0, 0, -2], [0] * 5, list(range(5)))
    made = by_turn(slate.advantages(t, ddof=0), t)
    np.testing.assert_allclose(made, [1.3568, 0.6030, -0.1508, -0.1508, -1.6583], atol=1e-4)


def test_slate_with_one_candidate_is_reinforce() -> None:
    t = table([1.5], [3], [0])
    assert by_turn(slate.advantages(t), t).tolist() == [1.5]


def test_slate_gives_equal_rewards_no_advantage_and_compares_within_a_group_only() -> None:
    t = table([1, 1, -1, 3], [0, 0, 1, 1], [0, 1, 0, 1])
    made = by_turn(slate.advantages(t), t)
    assert made[:2].tolist() == [0, 0]
    np.testing.assert_allclose(made[2:], [-np.sqrt(0.5), np.sqrt(0.5)], atol=1e-5)


def test_an_advantage_is_the_same_for_every_token_of_its_turn() -> None:
    t = table([2, 0], [0, 0], [0, 1])
    made = slate.advantages(t)
    assert len(made) == 3
    assert made[1] == made[2]


def test_grpo_sums_rewards_over_a_trajectory_and_compares_trajectories_of_a_tree() -> None:
    t = table([1, 1, 0, 0, 5], [0] * 5, [0, 0, 1, 1, 0], tree=[0, 0, 0, 0, 1])
    made = by_turn(grpo.advantages(t, std=False), t)
    assert made.tolist() == [1, 1, -1, -1, 0]


def test_grpo_known_answer_of_returns_over_two_turns_with_sample_and_population_deviation() -> None:
    # Returns 2, 1, 0, 0, -2: the known answer of SLATE's groups, reached over two turns a trajectory.
    first, second = [1.0, 2, -1, 0, -1], [1.0, -1, 1, 0, -1]
    t = table(first + second, [0] * 10, list(range(5)) * 2)
    sample = [1.2136, 0.5394, -0.1348, -0.1348, -1.4832]
    np.testing.assert_allclose(by_turn(grpo.advantages(t), t), sample * 2, atol=1e-4)
    population = [1.3568, 0.6030, -0.1508, -0.1508, -1.6583]
    np.testing.assert_allclose(by_turn(grpo.advantages(t, ddof=0), t), population * 2, atol=1e-4)


def test_grpo_on_outcomes_reads_them_where_they_are_and_a_single_trajectory_has_no_baseline_to_beat() -> None:
    t = table([0.0] * 4, [0] * 4, [0, 0, 1, 1])
    t.scores["outcome"] = np.array([np.nan, 1, np.nan, 0])
    made = by_turn(grpo.advantages(t, column="outcome"), t)
    np.testing.assert_allclose(made, np.sqrt([0.5, 0.5, 0.5, 0.5]) * [1, 1, -1, -1], atol=1e-5)
    alone = table([1.0], [0], [0])
    assert by_turn(grpo.advantages(alone), alone).tolist() == [0]


def test_a_score_column_that_no_turn_has_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="reward"):
        grpo.advantages(table([1.0], [0], [0]), column="outcome")


def test_an_unknown_scheme_or_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="slate"):
        schemes.load("slat", {})
    with pytest.raises(ValueError, match="ddof"):
        schemes.load("slate", {"dof": 1})
