"""Every scheme: known answers (methods.md 5, or worked by hand beside the test) and properties on
random tables."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coppice.learner import schemes
from coppice.learner.schemes import (
    gae,
    gigpo,
    grpo,
    mc_pr,
    oprl,
    outcome,
    ppr,
    prime,
    reinforce_pp,
    rloo,
    slate,
    slate_full,
    turn_grpo,
    vpr_v2,
)
from coppice.learner.update.table import TurnTable
from coppice.learner.update.targets import Estimate


def table(
    reward: list[float], group: list[int], trajectory: list[int], tree: list[int] | None = None
) -> TurnTable:
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
    np.testing.assert_allclose(
        by_turn(slate.advantages(t), t), [1.2136, 0.5394, -0.1348, -0.1348, -1.4832], atol=1e-4
    )


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
    # Returns 2, 1, 0, 0, -2: the known answer of SLATE's groups, reached over two turns a
    # trajectory.
    first, second = [1.0, 2, -1, 0, -1], [1.0, -1, 1, 0, -1]
    t = table(first + second, [0] * 10, list(range(5)) * 2)
    sample = [1.2136, 0.5394, -0.1348, -0.1348, -1.4832]
    np.testing.assert_allclose(by_turn(grpo.advantages(t), t), sample * 2, atol=1e-4)
    population = [1.3568, 0.6030, -0.1508, -0.1508, -1.6583]
    np.testing.assert_allclose(by_turn(grpo.advantages(t, ddof=0), t), population * 2, atol=1e-4)


def test_grpo_on_outcomes_reads_them_where_they_are_and_a_single_trajectory_has_no_baseline_to_beat() -> (
    None
):
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


def made_of(
    lengths: list[int],
    scores: dict[str, list[float]],
    tree: list[int] | None = None,
    tokens: list[int] | None = None,
    sampled: list[bool] | None = None,
    token_scores: dict[str, list[float]] | None = None,
    anchor: list[int] | None = None,
) -> TurnTable:
    """Whole trajectories, one after the other. lengths, tree: [trajectories]; scores, tokens,
    anchor: [turns]."""
    trees = np.repeat(tree or [0] * len(lengths), lengths)
    return TurnTable(
        tree=trees,
        group=trees,
        trajectory=np.repeat(np.arange(len(lengths)), lengths),
        turn=np.concatenate([np.arange(1, n + 1) for n in lengths]),
        tokens=np.array(tokens or [1] * sum(lengths)),
        scores={name: np.array(column, np.float64) for name, column in scores.items()},
        anchor=None if anchor is None else np.array(anchor),
        sampled=None if sampled is None else np.array(sampled),
        token_scores={name: np.array(column, np.float64) for name, column in (token_scores or {}).items()},
    )  # fmt: skip


NO = np.nan


def targets(made: Estimate) -> np.ndarray:
    """The critic's targets of an estimate that has some."""
    assert made.returns is not None
    return made.returns


# RLOO, REINFORCE++


def test_rloo_is_the_return_minus_the_mean_of_the_others_of_its_question() -> None:
    # returns 10, 0, 2 against 1, 6, 5; a question of two: 3 against -1; a lone trajectory has no
    # other
    t = made_of([2, 1, 1, 1, 1, 1], {"reward": [4, 6, 0, 2, 3, -1, 9]}, tree=[0, 0, 0, 1, 1, 2])
    np.testing.assert_allclose(rloo.advantages(t), [9, 9, -6, -3, 4, -4, 0])


def test_reinforce_pp_whitens_returns_centred_within_their_question_over_all_tokens_of_the_batch() -> (
    None
):
    # returns 3, 1 | 0, 2; tokens 1, 2 | 1, 1. Centred: 1, -1, -1 | -1, 1: mean -.2, variance 1 -
    # .04
    t = made_of([1] * 4, {"reward": [3, 1, 0, 2]}, tree=[0, 0, 1, 1], tokens=[1, 2, 1, 1])
    np.testing.assert_allclose(
        reinforce_pp.advantages(t), [1.2247, -0.8165, -0.8165, -0.8165, 1.2247], atol=5e-5
    )


def test_reinforce_pp_without_a_baseline_whitens_the_returns_themselves() -> None:
    # 3, 1, 1, 0, 2: mean 1.4, variance 3 - 1.96 = 1.04
    t = made_of([1] * 4, {"reward": [3, 1, 0, 2]}, tree=[0, 0, 1, 1], tokens=[1, 2, 1, 1])
    made = reinforce_pp.advantages(t, baseline="none")
    np.testing.assert_allclose(made, [1.5689, -0.3922, -0.3922, -1.3728, 0.5883], atol=5e-5)


def test_reinforce_pp_reads_statistics_from_sampled_tokens_only() -> None:
    # Sampled: 3, 1, 0 with mean 4/3 and variance 10/3 - 16/9 = 14/9; forced tokens get 0
    t = made_of([1] * 3, {"reward": [3, 1, 0]}, tokens=[1, 2, 1], sampled=[True, True, False, True])
    made = reinforce_pp.advantages(t, baseline="none")
    np.testing.assert_allclose(made, [1.3363, -0.2673, 0, -1.0690], atol=5e-5)


# PPO with a critic


def critic_case(**more: list[float]) -> TurnTable:
    """One trajectory of two turns, two tokens and one, the second token forced; values .5, .25,
    .75; outcome 1."""
    columns = {"value": [0.5, 0.25, 0.75]} | more
    return made_of(
        [2], {"outcome": [NO, 1]}, tokens=[2, 1], sampled=[True, False, True], token_scores=columns
    )


def test_gae_pays_the_outcome_at_the_last_token_and_targets_its_discounted_sum() -> None:
    plain = gae.advantages(critic_case(), whiten=False)
    np.testing.assert_allclose(plain.advantages, [0.5, 0.75, 0.25])
    np.testing.assert_allclose(targets(plain), [1, 1, 1])
    # gamma .9, lambda .5: deltas -.275, .425, .25; A_2 .25, A_1 .425 + .45 x .25, A_0 -.275 + .45
    # A_1
    made = gae.advantages(critic_case(), gamma=0.9, lam=0.5, whiten=False)
    np.testing.assert_allclose(made.advantages, [-0.0331, 0.5375, 0.25], atol=5e-5)
    np.testing.assert_allclose(targets(made), [0.4669, 0.7875, 1], atol=5e-5)


def test_gae_whitens_over_sampled_tokens_and_leaves_the_targets_raw() -> None:
    made = gae.advantages(critic_case())
    # .5 and .25: mean .375, std .125
    np.testing.assert_allclose(made.advantages, [1, 0, -1], atol=1e-6)
    np.testing.assert_allclose(targets(made), [1, 1, 1])


def test_gae_with_kl_in_the_reward_takes_it_from_sampled_tokens_only() -> None:
    # rewards -.1 x .2, forced, 1 - .1 x .3
    made = gae.advantages(critic_case(kl=[0.2, 5.0, 0.3]), whiten=False, kl_coef=0.1)
    np.testing.assert_allclose(targets(made), [0.95, 0.97, 0.97])
    np.testing.assert_allclose(made.advantages, [0.45, 0.72, 0.22])


def test_gae_corrects_its_targets_with_vtrace_or_retrace() -> None:
    t = critic_case(log_ratio=np.log([1.0, 1, 0.5]).tolist())
    # V-trace: the last target is .75 + .5 (1 - .75) = .875; on-policy before it, so the target is
    # passed on
    made = gae.advantages(t, whiten=False, targets="vtrace")
    np.testing.assert_allclose(targets(made), [0.875, 0.875, 0.875])
    np.testing.assert_allclose(made.advantages, [0.375, 0.625, 0.25])
    # With the last ratio 4 and rho-bar 2 the last target is .75 + 2 (1 - .75) = 1.25; c-bar .5
    # passes half of a gap on: deltas -.25, .5, .25 give gaps .125, .75, .5
    t_far = critic_case(log_ratio=np.log([1.0, 1, 4.0]).tolist())
    made = gae.advantages(t_far, whiten=False, targets="vtrace", rho_max=2.0)
    np.testing.assert_allclose(targets(made), [1.25, 1.25, 1.25])
    made = gae.advantages(t_far, whiten=False, targets="vtrace", rho_max=2.0, c_max=0.5)
    np.testing.assert_allclose(targets(made), [0.625, 1.0, 1.25])
    # Retrace: A_2 = .25; A_1 = .75 + .5 x .25 - .25 = .625; A_0 = .25 + .625 - .5
    made = gae.advantages(t, whiten=False, targets="retrace")
    np.testing.assert_allclose(made.advantages, [0.375, 0.625, 0.25])
    np.testing.assert_allclose(targets(made), [0.875, 0.875, 0.875])


# SLATE without truncation


def test_slate_full_compares_the_summed_rewards_of_whole_trajectories() -> None:
    # Returns 2, 1, 0, 0, -2 reached over one or two turns: the known answer of SLATE's candidates
    t = made_of([2, 1, 2, 1, 2], {"reward": [1.5, 0.5, 1, 1, -1, 0, -1, -1]})
    expected = [1.2136, 1.2136, 0.5394, -0.1348, -0.1348, -0.1348, -1.4832, -1.4832]
    np.testing.assert_allclose(slate_full.advantages(t), expected, atol=5e-5)
    assert slate_full.advantages(t, ddof=0)[0] == pytest.approx(1.3568, abs=5e-5)


# VPR


def vpr_case() -> TurnTable:
    """methods.md 5: rewards by turn, in trajectories of 4, 3, 3, 2, 2 and 1 turns."""
    turns = [[1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1], [0, 1, 1], [1]]
    rewards = [float(turns[t][i]) for i in range(6) for t in range(4) if i < len(turns[t])]
    return made_of([4, 3, 3, 2, 2, 1], {"reward": rewards})


def test_turn_grpo_known_answer_with_the_whole_batch_where_fewer_than_n_min_are_active() -> None:
    t = vpr_case()
    made = turn_grpo.advantages(t)
    expected = {
        1: [0.7071, -1.4142, 0.7071, 0.7071, -1.4142, 0.7071],
        2: [0.5, 0.5, -2, 0.5, 0.5],
        3: [-1.6583, 0.6030, 0.6030],
        4: [0.6030],
    }
    for turn, answers in expected.items():
        np.testing.assert_allclose(made[t.turn == turn], answers, atol=5e-5)


def test_turn_grpo_compares_a_turn_with_itself_from_n_min_active_trajectories_on() -> None:
    t = vpr_case()
    # turn 3 alone: 0, 1, 1 with mean 2/3, std .4714
    made = turn_grpo.advantages(t, n_min=3)
    np.testing.assert_allclose(made[t.turn == 3], [-1.4142, 0.7071, 0.7071], atol=5e-5)
    np.testing.assert_allclose(made[t.turn == 4], [0.6030], atol=5e-5)
    every = turn_grpo.advantages(t, n_min=7)
    np.testing.assert_allclose(every, (t.column("reward") - 11 / 15) / 0.442217, atol=5e-5)


def test_vpr_v2_known_answer_equal_groups_stay_out_of_the_whitening() -> None:
    rewards = [2, 0, -1, -1, 1, 1, 1, 1, 0.5, -2, NO, 0.5]
    t = made_of([1] * 12, {"reward": rewards}, tree=[0] * 4 + [1] * 4 + [2] * 4)
    # centred: 2, 0, -1, -1 and (mean -1/3) 5/6, -5/3, 5/6; their squares sum to 6 + 25/6 over seven
    # candidates
    scale = ((6 + 25 / 6) / 7) ** 0.5
    expected = np.array([2, 0, -1, -1, 0, 0, 0, 0, 5 / 6, -5 / 3, 0, 5 / 6]) / scale
    np.testing.assert_allclose(vpr_v2.advantages(t), expected, atol=1e-7)
    np.testing.assert_allclose(vpr_v2.advantages(t, most_equal=1 / 3), expected, atol=1e-7)
    assert not vpr_v2.advantages(t, most_equal=0.33).any(), "one of three groups is equal"


def test_vpr_v2_gives_nothing_where_nothing_differs() -> None:
    assert not vpr_v2.advantages(made_of([1] * 4, {"reward": [1, 1, NO, NO]})).any()


def test_turn_grpo_leaves_turns_without_a_score_out_of_every_statistic() -> None:
    t = made_of([1] * 5, {"reward": [1, 0, 1, 0, NO]})
    np.testing.assert_allclose(turn_grpo.advantages(t), [1, -1, 1, -1, 0], atol=1e-6)
    assert turn_grpo.advantages(made_of([2], {"reward": [NO, NO]})).tolist() == [0, 0]


def test_outcome_compares_episodes_of_the_whole_batch() -> None:
    # returns 1, -1, 0 (out of turns), 1: mean .25, population variance .75 - .0625
    t = made_of([2, 1, 2, 1], {"outcome": [NO, 1, -1, NO, 0, 1]}, tree=[0, 1, 2, 3])
    expected = [0.9045, 0.9045, -1.5076, -0.3015, -0.3015, 0.9045]
    np.testing.assert_allclose(outcome.advantages(t), expected, atol=5e-5)


def test_mc_pr_rewards_are_differences_of_values_that_end_at_the_outcome() -> None:
    t = made_of(
        [3, 2, 1], {"mc_value": [0.5, 0.7, 0.2, 0.5, 0.9, 0.4], "outcome": [NO, NO, 1, NO, -1, NO]}
    )
    # the last episode has no outcome, so its last difference is unknown
    np.testing.assert_allclose(mc_pr.temporal_differences(t), [0.2, -0.5, 0.8, 0.4, -1.9, NO])
    summed = [mc_pr.temporal_differences(t)[rows].sum() for rows in t.trajectories().rows]
    np.testing.assert_allclose(summed, [1 - 0.5, -1 - 0.5, NO])  # telescopes to outcome - V(s_0)


def test_mc_pr_normalises_the_differences_by_turn_and_leaves_out_turns_next_to_a_missing_value() -> (
    None
):
    values = [0.5, 0.9, 0.5, 0.1, 0.5, 0.9, 0.5, 0.1, 0.5, NO]
    t = made_of([2] * 5, {"mc_value": values, "outcome": [NO, 1, NO, 0] * 2 + [NO, 1]})
    # turn 1: .4, -.4, .4, -.4 and one missing; turn 2: .1, -.1, .1, -.1 and one missing
    np.testing.assert_allclose(mc_pr.advantages(t), [1, 1, -1, -1] * 2 + [0, 0], atol=1e-6)


# PPR


def ppr_case(r_hat: list[float], r_o: float) -> TurnTable:
    """One trajectory of judged turns and a last one, a token each; the critic knows nothing."""
    n = len(r_hat) + 1
    return made_of(
        [n],
        {"process": [*r_hat, NO], "outcome": [NO] * (n - 1) + [r_o]},
        token_scores={"value": [0.0] * n},
    )


@pytest.mark.parametrize(
    ("r_hat", "r_o", "rewards", "returns"),
    [
        ([4 / 6, 1], 1, [0.6667, 1, 1], [2.6667, 2, 1]),
        ([4 / 6, 1], 0, [-0.3333, 0, 0], [-0.3333, 0, 0]),
        ([1, 1], 1, [1, 1, 1], [3, 2, 1]),
        ([1] * 4, 1, [1] * 5, [5, 4, 3, 2, 1]),
        ([0.8] * 2, 0, [-0.2, -0.2, 0], [-0.4, -0.2, 0]),
        ([0.8] * 4, 0, [-0.2] * 4 + [0], [-0.8, -0.6, -0.4, -0.2, 0]),
    ],
)
def test_renorm_by_a_constant_known_answers_and_returns(
    r_hat: list[float], r_o: float, rewards: list[float], returns: list[float]
) -> None:
    t = ppr_case(r_hat, r_o)
    np.testing.assert_allclose(ppr.turn_rewards(t), rewards, atol=5e-5)
    made = ppr.advantages(t, whiten=False)
    np.testing.assert_allclose(targets(made), returns, atol=5e-5)
    np.testing.assert_allclose(made.advantages, returns, atol=5e-5)


def two_judged() -> TurnTable:
    """Trajectories with r_hat .5, 1, .25 (an invalid judgement before it) and r_o = 1, 0; three
    tokens a turn."""
    process, score = [0.5, 1, NO, NO, 0.25, NO], [NO, NO, 1, NO, NO, 0]
    values = {"value": [0.0] * 18}
    return made_of(
        [3, 3], {"process": process, "outcome": score}, tokens=[3] * 6, token_scores=values
    )


def test_ppr_other_normalisations_by_hand() -> None:
    t = two_judged()

    def rewards(how: ppr.Normalisation, **options: Any) -> list[float]:
        return ppr.turn_rewards(t, how, **options).tolist()

    assert rewards("constant") == [0.5, 1, 1, -1, -0.75, 0]
    assert rewards("none") == [0.5, 1, 1, 0, 0.25, 0]
    assert rewards("rescale") == [0.25, 0.5, 1, 0, 0.125, 0]
    assert rewards("reduced") == [0, 0, 2.5, 0, 0, 0.25]
    # sample: mu = 1.75 / 4, pi = 2 / 4
    assert rewards("sample") == [0.5625, 1.0625, 1, -0.9375, -0.6875, 0]


def test_an_invalid_judgement_counts_as_zero_or_is_skipped_whole() -> None:
    t = two_judged()

    def skipped(how: ppr.Normalisation) -> list[float]:
        return ppr.turn_rewards(t, how, "skip").tolist()

    assert skipped("constant") == [0.5, 1, 1, 0, -0.75, 0]
    assert skipped("rescale") == [0.25, 0.5, 1, 0, 0.25, 0]
    # sample: mu = 1.75 / 3, pi = 2 / 3 over the three judged turns
    np.testing.assert_allclose(ppr.turn_rewards(t, "sample", "skip"), [0.25, 0.75, 1, 0, -1, 0])


def test_ppr_pays_each_turn_at_its_last_token() -> None:
    made = ppr.advantages(two_judged(), whiten=False)
    np.testing.assert_allclose(targets(made)[:9], [2.5] * 3 + [2] * 3 + [1] * 3)
    np.testing.assert_allclose(targets(made)[9:], [-1.75] * 3 + [-0.75] * 3 + [0] * 3)


def test_ppr_does_not_judge_the_last_turn_even_where_a_score_is_there() -> None:
    t = made_of([2], {"process": [0.5, 0.9], "outcome": [NO, 1]})
    for how in ("constant", "none", "rescale"):
        assert ppr.turn_rewards(t, how)[1] == 1
    assert ppr.turn_rewards(t, "reduced").tolist() == [0, 1.5]


def test_ppr_measures_what_a_turn_pays_in_correct_and_in_wrong_trajectories() -> None:
    assert schemes.load("ppr", {}).metrics(two_judged()) == {
        "ppr/turns_correct": 3,
        "ppr/turns_wrong": 3,
        "ppr/turn_pay_correct": 0.75,  # (.5 + 1) / 2
        "ppr/turn_pay_wrong": -0.875,  # (-1 + .25 - 1) / 2: the invalid one counts as r_hat = 0
        "ppr/process_reward": -0.0625,
    }
    assert "ppr/turn_pay_correct" not in schemes.load("ppr", {}).metrics(ppr_case([], 1))
    skipped = schemes.load("ppr", {"invalid": "skip"}).metrics(two_judged())
    assert (skipped["ppr/turn_pay_wrong"], skipped["ppr/process_reward"]) == (-0.75, 0.25)
    reduced = schemes.load("ppr", {"normalisation": "reduced"}).metrics(two_judged())
    assert (reduced["ppr/turn_pay_correct"], reduced["ppr/turn_pay_wrong"]) == (
        0.75,
        0.125,
    )  # what each adds to the end


def test_ppr_refuses_an_unknown_normalisation() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*expected constant, sample"):
        ppr.turn_rewards(two_judged(), "mean")  # pyright: ignore[reportArgumentType]


# OPRL


def oprl_case(**more: list[float]) -> TurnTable:
    """methods.md 5: log-ratios [[4, -2], [1, 0, -3]], beta .05, R = [10, 0]."""
    columns = {"outcome": [NO, 10, NO, NO, 0], "reward": [1, 2, 3, 4, NO]} | more
    prm = [0.05 * x for x in (4, -2, 1, 0, -3)]
    return made_of([2, 3], columns, token_scores={"prm": prm, "value": [0.0] * 5})


A_S = {"grpo": [1.4606, -0.7303, 0.3651, 0, -1.0954], "rloo": [0.25, -0.125, 0.0625, 0, -0.1875]}
A_E = {"grpo": [0.7071, 0.7071, -0.7071, -0.7071, -0.7071], "rloo": [10, 10, -10, -10, -10]}
BASES: list[oprl.Base] = ["grpo", "rloo", "reinforce_pp", "ppo"]
VARIANTS: list[oprl.Variant] = ["step", "process", "merged", "token", "environment"]


@pytest.mark.parametrize("base", ["grpo", "rloo"])
def test_oprl_known_answers_of_the_step_advantage_alone_and_on_top_of_the_episode_advantage(
    base: oprl.Base,
) -> None:
    t = oprl_case()
    np.testing.assert_allclose(oprl.advantages(t, base, "process").advantages, A_S[base], atol=5e-5)
    np.testing.assert_allclose(oprl.advantages(t, base, alpha=0).advantages, A_E[base], atol=5e-5)
    both = np.add(A_E[base], 2 * np.array(A_S[base]))
    np.testing.assert_allclose(oprl.advantages(t, base, alpha=2).advantages, both, atol=1e-4)


def test_oprl_on_reinforce_pp_whitens_each_level_on_its_own() -> None:
    # Outcomes centred: 5, 5, -5, -5, -5 over tokens: mean -1, variance 25 - 1
    t = oprl_case()
    np.testing.assert_allclose(
        oprl.advantages(t, "reinforce_pp", alpha=0).advantages,
        [1.2247, 1.2247, -0.8165, -0.8165, -0.8165],
        atol=5e-5,
    )
    # .2, -.1, .05, 0, -.15 with mean 0 and population variance .015: sample A_S x sqrt(5 / 4)
    expected = np.sqrt(5 / 4) * np.array(A_S["grpo"])
    np.testing.assert_allclose(
        oprl.advantages(t, "reinforce_pp", "process").advantages, expected, atol=1e-4
    )


def test_oprl_on_ppo_adds_the_step_advantage_to_token_gae_on_the_outcome() -> None:
    t = oprl_case()
    made, critic = oprl.advantages(t, "ppo"), gae.advantages(t)
    np.testing.assert_allclose(made.advantages, critic.advantages + A_S["grpo"], atol=5e-5)
    assert targets(made).tolist() == [10, 10, 0, 0, 0]


def test_oprl_merged_compares_outcome_plus_step_score_once() -> None:
    # 10 + [.2, -.1] and 0 + [.05, 0, -.15]: leave-one-out over the five rows, sum 20
    made = oprl.advantages(oprl_case(), "rloo", "merged").advantages
    rows = np.array([10.2, 9.9, 0.05, 0, -0.15])
    np.testing.assert_allclose(made, rows - (20 - rows) / 4)


def test_oprl_with_the_environments_rewards_reads_them_instead_of_the_reward_model() -> None:
    # 1, 2, 3, 4 with mean 2.5; the fifth step has no reward
    made = oprl.advantages(oprl_case(), "rloo", "environment", alpha=1).advantages - A_E["rloo"]
    np.testing.assert_allclose(made, 4 / 3 * np.array([-1.5, -0.5, 0.5, 1.5, 0]))
    made = oprl.advantages(oprl_case(), "reinforce_pp", "environment", alpha=1).advantages
    made -= oprl.advantages(oprl_case(), "reinforce_pp", alpha=0).advantages
    np.testing.assert_allclose(made, np.array([-1.5, -0.5, 0.5, 1.5, 0]) / 1.25**0.5, atol=1e-7)


def test_oprl_token_level_compares_returns_to_go_of_the_implicit_reward() -> None:
    # returns-to-go: .1, -.1 | -.1, -.15, -.15: sum -.4
    made = oprl.advantages(oprl_case(), "rloo", "token").advantages - A_E["rloo"]
    ahead = np.array([0.1, -0.1, -0.1, -0.15, -0.15])
    np.testing.assert_allclose(made, 1.25 * (ahead + 0.08), atol=1e-12)


@pytest.mark.parametrize(("base", "moved"), [("grpo", 0.1 / np.sqrt(50)), ("rloo", 0.1)])
def test_an_invalid_step_lowers_the_advantage_of_its_own_row_and_of_no_other(
    base: oprl.Base, moved: float
) -> None:
    plain, fined = (
        oprl.advantages(t, base).advantages
        for t in (oprl_case(), oprl_case(valid=[1, 1, 0, NO, 1]))
    )
    np.testing.assert_allclose(plain - fined, [0, 0, moved, 0, 0], atol=1e-7)
    harder = oprl.advantages(
        oprl_case(valid=[1, 1, 0, NO, 1]), base, invalid_penalty=1.0
    ).advantages
    np.testing.assert_allclose(plain - harder, [0, 0, 10 * moved, 0, 0], atol=1e-6)


@pytest.mark.parametrize("variant", ["step", "token"])
@pytest.mark.parametrize("base", ["grpo", "rloo", "reinforce_pp", "ppo"])
def test_an_invalid_step_loses_more_than_any_other_under_every_base(
    base: oprl.Base, variant: oprl.Variant
) -> None:
    plain, fined = (
        oprl.advantages(t, base, variant).advantages
        for t in (oprl_case(), oprl_case(valid=[1, 1, 0, 1, 1]))
    )
    lost = plain - fined
    assert lost[2] > 0
    assert lost[2] > np.delete(lost, 2).max() + 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base", BASES)
def test_every_base_and_variant_of_oprl_is_finite_and_reads_only_the_columns_it_names(
    base: oprl.Base, variant: oprl.Variant
) -> None:
    t = oprl_case(valid=[1, 0, 1, 1, 1])
    scheme = schemes.load("oprl", {"base": base, "variant": variant})
    needed = {
        name: column for name, column in t.token_scores.items() if name in scheme.needs.models
    }
    made = scheme(msgspec.structs.replace(t, token_scores=needed))
    assert np.isfinite(made.advantages).all()
    assert made.advantages.any()
    assert (made.returns is not None) == (base == "ppo") == ("value" in scheme.needs.models)
    for missing in needed:
        rest = {name: column for name, column in needed.items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            scheme(msgspec.structs.replace(t, token_scores=rest))


@pytest.mark.parametrize("variant", ["step", "process", "token"])
@pytest.mark.parametrize("base", BASES)
def test_a_reward_model_that_never_stepped_gives_zeros_and_so_no_step_advantage(
    base: oprl.Base, variant: oprl.Variant
) -> None:
    t = oprl_case()
    t.token_scores["prm"] = np.zeros(5)
    made = oprl.advantages(t, base, variant).advantages
    episode = np.zeros(5) if variant == "process" else oprl.advantages(t, base, alpha=0).advantages
    np.testing.assert_array_equal(made, episode)


# GiGPO


def test_gigpo_compares_discounted_returns_of_steps_that_answered_the_same_observation() -> None:
    # G: 0 + .95 x 1, 1 | 0, 0 + ... ; anchors: 7 (both first steps), 8 and 9 (alone)
    t = made_of([2, 3], {"reward": [0, 1, 0.5, 0, 1]}, anchor=[7, 8, 7, 9, 8])
    # G = [.95, 1], [.5 + .9025, .95, 1]; anchor 7: .95, 1.4025; anchor 8: 1, 1; anchor 9 alone.
    # Episodes: 1, 1.5
    steps = gigpo.advantages(t) - [-0.25, -0.25, 0.25, 0.25, 0.25]
    np.testing.assert_allclose(steps, [-0.2263, 0, 0.2263, 0, 0], atol=5e-5)
    np.testing.assert_allclose(gigpo.advantages(t, alpha=0), [-0.25, -0.25, 0.25, 0.25, 0.25])
    scaled = gigpo.advantages(t, alpha=0, episode_std=True)
    np.testing.assert_allclose(scaled, [-0.7071, -0.7071, 0.7071, 0.7071, 0.7071], atol=5e-5)
    scaled = gigpo.advantages(t, step_std=True) - gigpo.advantages(t, alpha=0)
    np.testing.assert_allclose(scaled, [-0.7071, 0, 0.7071, 0, 0], atol=5e-5)


def test_gigpo_shares_an_observation_within_a_question_only_and_needs_observations() -> None:
    t = made_of([1, 1], {"reward": [0, 1]}, tree=[0, 1], anchor=[7, 7])
    assert gigpo.advantages(t).tolist() == [0, 0]
    with pytest.raises(KeyError, match="anchor"):
        gigpo.advantages(made_of([1], {"reward": [1]}))


def test_gigpo_reads_an_outcome_that_only_last_turns_have_and_compares_steps_of_one_trajectory_too() -> (
    None
):
    # G = .95 x 1, 1 on one observation: mean .975; a lone episode has no episode advantage
    t = made_of([2], {"reward": [NO, 1]}, anchor=[3, 3])
    np.testing.assert_allclose(gigpo.advantages(t), [-0.025, 0.025], atol=1e-12)


# PRIME


def prime_case() -> TurnTable:
    """Two responses to question 0 (one of two turns), two to question 1; outcomes 1, 0 and 1, 1; a
    forced token."""
    return made_of(
        [2, 1, 1, 1], {"outcome": [NO, 1, 0, 1, 1]}, tree=[0, 0, 1, 1], tokens=[2, 1, 2, 1, 2],
        sampled=[True, True, True, True, False, True, True, True],
        token_scores={"prm": [0.2, -0.1, 0.3, -0.4, 9.0, 0.1, 0.2, -0.3]},
    )  # fmt: skip


def prime_by_hand(low: float, high: float) -> list[float]:
    """A loop over the responses of ``prime_case``: (question, outcome, token rewards, sampled)."""
    responses = [
        (0, 1.0, [0.2, -0.1, 0.3], [1, 1, 1]),
        (0, 0.0, [-0.4, 0.0], [1, 0]),
        (1, 1.0, [0.1], [1]),
        (1, 1.0, [0.2, -0.3], [1, 1]),
    ]
    accuracy = {
        q: np.mean([score > 0 for other, score, _, _ in responses if other == q]) for q in (0, 1)
    }
    fit = [low <= accuracy[question] <= high for question, _, _, _ in responses]
    largest = max(
        abs(sum(r[i:]))
        for (_, _, r, _), fits in zip(responses, fit, strict=True)
        for i in range(len(r))
        if fits
    )
    flat, kept = [], []
    for (question, score, rewards, sampled), fits in zip(responses, fit, strict=True):
        mates = [m for m in responses if m[0] == question]
        n = len(mates)
        mean = sum(sum(r) / largest / sum(s) for _, _, r, s in mates) / n
        final = n / (n - 1) * (score - sum(m[1] for m in mates) / n)
        process = [
            s * n / (n - 1) * (r / largest - mean) for r, s in zip(rewards, sampled, strict=True)
        ]
        for i, s in enumerate(sampled):
            flat.append(5 * sum(process[i:]) + 5 * final)
            kept.append(bool(s) and fits)
    inside = [x for x, k in zip(flat, kept, strict=True) if k]
    mean = sum(inside) / len(inside)
    std = (sum((x - mean) ** 2 for x in inside) / len(inside)) ** 0.5
    return [(x - mean) / std if k else 0.0 for x, k in zip(flat, kept, strict=True)]


def test_prime_is_the_loop_over_responses_written_out() -> None:
    made = prime.advantages(prime_case(), accuracy_low=0, accuracy_high=1)
    np.testing.assert_allclose(made, prime_by_hand(0, 1), atol=1e-6)


def test_prime_leaves_questions_out_that_are_too_easy_or_too_hard() -> None:
    made = prime.advantages(prime_case())
    np.testing.assert_allclose(made, prime_by_hand(0.2, 0.8), atol=1e-6)
    assert made[5:].tolist() == [0, 0, 0]
    assert prime.advantages(prime_case(), accuracy_low=0.6, accuracy_high=0.9).tolist() == [0] * 8


def test_prime_sets_its_scale_after_the_filter() -> None:
    # In question 0 the token rewards are 1 and -1, whose largest return-to-go is 1; question 1 is
    # too easy and has 50.
    prm = {"prm": [0.0, 1, -1, 0, 50, 0, 0, 0]}
    t = made_of(
        [1] * 4, {"outcome": [1, 0, 1, 1]}, tree=[0, 0, 1, 1], tokens=[2] * 4, token_scores=prm
    )
    # (x - mean of means) x 2: means .5 and -.5; outcome 2 (x - .5) = 1, -1; returns-to-go 5 (2 +
    # 1), 5 (2 + 1) and 5 (-2 - 1), -5
    np.testing.assert_allclose(prime.advantages(t)[4:], 0)
    expected = np.array([15, 15, -15, -5])
    np.testing.assert_allclose(
        prime.advantages(t)[:4], (expected - 2.5) / expected.std(), atol=1e-6
    )


def test_prime_takes_the_accuracy_of_a_question_over_the_outcomes_that_are_there() -> None:
    score = {"outcome": [1, 0, NO, 1, NO, 1]}
    t = made_of(
        [1] * 6, score, tree=[0, 0, 0, 1, 1, 1], token_scores={"prm": [0.5, -0.25, 9, 1, 2, 3]}
    )
    np.testing.assert_allclose(prime.advantages(t), [1, -1, 0, 0, 0, 0], atol=1e-6)
    assert schemes.load("prime", {}).trains(t).tolist() == [True, True, False, False, False, False]


def test_prime_by_hand_for_two_responses_of_one_token() -> None:
    # prm .5, -.25 scaled by .5: 1, -.5; leave-one-out 1.5, -1.5; outcome 1, -1: 5 x 2.5 and -12.5,
    # whitened
    t = made_of([1, 1], {"outcome": [1, 0]}, token_scores={"prm": [0.5, -0.25]})
    np.testing.assert_allclose(prime.advantages(t), [1, -1], atol=1e-6)
    only = prime.advantages(t, process_weight=0)
    np.testing.assert_allclose(only, [1, -1], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppr", {"normalisation": "mean"}),
        ("oprl", {"base": "a2c"}),
        ("oprl", {"variant": "turn"}),
        ("reinforce_pp", {"baseline": "mean"}),
        ("ppr", {"invalid": "Skip"}),
        ("ppr", {"targets": "vtraces"}),
        ("gae", {"targets": "vtraces"}),
        ("gae", {"gamma": "high"}),
        ("grpo", {"std": 3}),
    ],
)
def test_an_unknown_value_of_an_option_is_refused_with_the_known_ones(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options.values()))!r}: expected"):
        schemes.load(name, options)


# Properties on random tables

SEEDS = st.integers(0, 2**32 - 1)
EVERY: list[tuple[str, dict[str, Any]]] = [
    ("gae", {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1}),
    ("gae", {"whiten": False, "targets": "vtrace"}),
    ("gigpo", {"step_std": True, "episode_std": True}),
    ("grpo", {}),
    ("mc_pr", {}),
    *(("oprl", {"base": base, "variant": variant}) for base in BASES for variant in VARIANTS),
    ("outcome", {}),
    *(
        ("ppr", {"normalisation": how})
        for how in ("constant", "sample", "none", "rescale", "reduced")
    ),
    ("ppr", {"invalid": "skip", "targets": "retrace"}),
    ("prime", {"accuracy_low": 0, "accuracy_high": 1}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"baseline": "none"}),
    ("rloo", {}),
    ("slate", {}),
    ("slate_full", {}),
    ("turn_grpo", {"n_min": 2}),
    ("vpr_v2", {}),
]


def random_table(seed: int) -> TurnTable:
    """One to three questions of one to four trajectories of one to four turns, with every column
    there is."""
    rng = np.random.default_rng(seed)
    tree = np.repeat(np.arange(3), rng.integers(1, 5, 3))[: rng.integers(2, 12)]
    lengths = rng.integers(1, 5, len(tree))
    ends = np.cumsum(lengths) - 1
    n = int(lengths.sum())
    tokens = rng.integers(1, 4, n)
    total = int(tokens.sum())
    score = np.full(n, NO)
    score[ends] = rng.integers(0, 2, len(ends))
    process = rng.integers(0, 7, n) / 6
    process[ends] = NO
    process[rng.random(n) < 0.2] = NO
    columns = {
        "outcome": score.tolist(), "process": process.tolist(), "reward": rng.normal(0, 1, n).tolist(),
        "mc_value": rng.random(n).tolist(), "valid": rng.integers(0, 2, n).tolist(),
    }  # fmt: skip
    models = {
        name: rng.normal(0, 1, total).tolist() for name in ("prm", "value", "kl", "log_ratio")
    }
    return made_of(
        lengths.tolist(), columns, tree.tolist(), tokens.tolist(),
        (rng.random(total) < 0.8).tolist(), models, rng.integers(0, 3, n).tolist(),
    )  # fmt: skip


def permuted(t: TurnTable, order: np.ndarray) -> tuple[TurnTable, np.ndarray]:
    """The table with its rows in another order, and the old index of each token."""
    pieces = np.split(np.arange(int(t.tokens.sum())), np.cumsum(t.tokens)[:-1])
    flat = np.concatenate([pieces[i] for i in order])
    assert t.anchor is not None
    moved = TurnTable(
        t.tree[order], t.group[order], t.trajectory[order], t.turn[order], t.tokens[order],
        {name: column[order] for name, column in t.scores.items()}, t.anchor[order], t.mask()[flat],
        {name: column[flat] for name, column in t.token_scores.items()},
    )  # fmt: skip
    return moved, flat


ON_TREES = {"arpo", "sao", "spo", "tree_grpo", "treepo", "treerl", "vineppo"}
"""Schemes that also read the tokens, in test_tree_schemes.py."""


def test_the_properties_cover_every_scheme() -> None:
    assert {name for name, _ in EVERY} | ON_TREES == set(schemes.names())


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(EVERY))
def test_permuting_the_rows_permutes_advantages_and_targets(
    seed: int, which: tuple[str, dict[str, Any]]
) -> None:
    t, scheme = random_table(seed), schemes.load(*which)
    moved, flat = permuted(t, np.random.default_rng(seed).permutation(len(t)))
    before, after = scheme(t), scheme(moved)
    np.testing.assert_allclose(after.advantages, before.advantages[flat], atol=1e-6)
    if before.returns is not None:
        np.testing.assert_allclose(targets(after), before.returns[flat], atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from(EVERY))
def test_what_models_say_of_forced_tokens_changes_no_advantage_of_a_sampled_one(
    seed: int, which: tuple[str, dict[str, Any]]
) -> None:
    """The critic excepted: the value of a forced token is the value of a state like any other."""
    t = random_table(seed)
    models = {
        name: np.where(t.mask() | (name in ("value", "log_ratio")), c, 77.0)
        for name, c in t.token_scores.items()
    }
    other = msgspec.structs.replace(t, token_scores=models)
    scheme = schemes.load(*which)
    np.testing.assert_allclose(
        scheme(other).advantages[t.mask()], scheme(t).advantages[t.mask()], atol=1e-6
    )


def without_forced(t: TurnTable) -> TurnTable:
    """The table as if its forced tokens were not there."""
    tokens = np.bincount(t.row(), weights=t.mask(), minlength=len(t)).astype(np.int64)
    kept = {name: column[t.mask()] for name, column in t.token_scores.items()}
    return msgspec.structs.replace(t, tokens=tokens, sampled=t.mask()[t.mask()], token_scores=kept)


WITHOUT_CRITIC = [
    (name, options)
    for name, options in EVERY
    if name not in ("gae", "ppr") and options.get("base") != "ppo"
]


def forced_change_nothing(seed: int, name: str, options: dict[str, Any]) -> None:
    t, scheme = random_table(seed), schemes.load(name, options)
    assume((np.bincount(t.row(), weights=t.mask(), minlength=len(t)) > 0).all())
    bare = scheme(without_forced(t)).advantages
    np.testing.assert_allclose(scheme(t).advantages[t.mask()], bare, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    SEEDS,
    st.sampled_from([which for which in WITHOUT_CRITIC if which[1].get("variant") != "token"]),
)
def test_forced_tokens_change_no_advantage_of_a_sampled_one(
    seed: int, which: tuple[str, dict[str, Any]]
) -> None:
    forced_change_nothing(seed, *which)


@pytest.mark.parametrize("base", ["grpo", "rloo", "reinforce_pp"])
def test_forced_tokens_change_no_advantage_of_a_sampled_one_in_oprls_token_variant(
    base: oprl.Base,
) -> None:
    for seed in (0, 1, 2, 3):
        t = random_table(seed)
        t = permuted(
            t, np.flatnonzero(np.bincount(t.row(), weights=t.mask(), minlength=len(t)) > 0)
        )[0]
        scheme = schemes.load("oprl", {"base": base, "variant": "token"})
        np.testing.assert_allclose(
            scheme(t).advantages[t.mask()], scheme(without_forced(t)).advantages, atol=1e-6
        )


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_advantages_of_trajectories_sum_to_zero_within_a_question(seed: int) -> None:
    t = random_table(seed)
    ends = [rows[-1] for rows in t.trajectories().rows]
    tree = t.tree[ends]
    made = [
        grpo.advantages(t),
        rloo.advantages(t),
        slate_full.advantages(t),
        grpo.advantages(t, std=False),
    ]
    for advantages in made:
        each = by_turn(advantages, t)[ends]
        np.testing.assert_allclose(np.bincount(tree, weights=each), 0, atol=1e-9)
    np.testing.assert_allclose(by_turn(outcome.advantages(t), t)[ends].sum(), 0, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_advantages_of_steps_sum_to_zero_over_what_they_are_compared_with(seed: int) -> None:
    t = random_table(seed)
    for base in ("grpo", "rloo"):
        for variant in ("process", "merged"):
            made = by_turn(oprl.advantages(t, base, variant).advantages, t)
            np.testing.assert_allclose(np.bincount(t.tree, weights=made), 0, atol=1e-9)
    made = by_turn(gigpo.advantages(t), t) - by_turn(gigpo.advantages(t, alpha=0), t)
    assert t.anchor is not None
    np.testing.assert_allclose(np.bincount(3 * t.tree + t.anchor, weights=made), 0, atol=1e-9)
    made = by_turn(turn_grpo.advantages(t, n_min=2), t)
    for turn in np.flatnonzero(np.bincount(t.turn) >= 2):
        assert made[t.turn == turn].sum() == pytest.approx(0, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.floats(0.1, 10), st.floats(-5, 5))
def test_standardised_advantages_do_not_depend_on_scale_or_offset_of_the_scores(
    seed: int, scale: float, offset: float
) -> None:
    t = random_table(seed)
    ends = t.trajectories().last()
    moved = {
        "reward": scale * t.column("reward"),
        "outcome": scale * t.column("outcome") + np.where(ends, offset, NO),
    }
    other = msgspec.structs.replace(t, scores=t.scores | moved)
    for scheme in (grpo, outcome):  # the default eps counts where a group's scores hardly differ
        before, after = scheme.advantages(t, eps=1e-12), scheme.advantages(other, eps=1e-12)
        np.testing.assert_allclose(after, before, atol=1e-3)
    np.testing.assert_allclose(rloo.advantages(other), scale * rloo.advantages(t), atol=1e-9)
    np.testing.assert_allclose(
        rloo.advantages(other, "outcome"), scale * rloo.advantages(t, "outcome"), atol=1e-9
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_renorm_by_a_constant_keeps_the_sign_of_the_outcome_and_stays_between_minus_one_and_one(
    seed: int,
) -> None:
    t = random_table(seed)
    trajectories = t.trajectories()
    r_o = trajectories.total(t.column("outcome"))[trajectories.of]
    judged = ~trajectories.last()
    for invalid in ("zero", "skip"):
        made = ppr.turn_rewards(t, invalid=invalid)
        assert (np.abs(made) <= 1).all()
        assert (made[judged & (r_o == 0)] <= 0).all()
        assert (made[judged & (r_o == 1)] >= 0).all()
        assert (made[~judged] == r_o[~judged]).all()


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_renorm_by_the_sample_has_mean_zero_over_the_judged_turns(seed: int) -> None:
    t = random_table(seed)
    judged = ~t.trajectories().last()
    assume(judged.any())
    assert ppr.turn_rewards(t, "sample")[judged].mean() == pytest.approx(0, abs=1e-12)
    valid = judged & ~np.isnan(t.column("process"))
    if valid.any():
        skipped = ppr.turn_rewards(t, "sample", "skip")
        assert skipped[valid].mean() == pytest.approx(0, abs=1e-12)
        assert (skipped[judged & ~valid] == 0).all()


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_reduced_and_unnormalised_process_rewards_pay_the_same_in_all(seed: int) -> None:
    t = random_table(seed)
    trajectories = t.trajectories()
    paid = [trajectories.total(ppr.turn_rewards(t, how)) for how in ("reduced", "none")]
    np.testing.assert_allclose(paid[0], paid[1])


# Missing scores: no baseline, no spread, no advantage


def lacking(t: TurnTable, turns: np.ndarray) -> TurnTable:
    """The table without the outcome and the rewards of some turns, [turns]."""
    missing = {name: np.where(turns, NO, t.column(name)) for name in ("outcome", "reward")}
    return msgspec.structs.replace(t, scores=t.scores | missing)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from([which for which in EVERY if which[0] != "slate"]))
def test_a_trajectory_without_its_outcome_changes_no_other_and_gets_nothing(
    seed: int, which: tuple[str, dict[str, Any]]
) -> None:
    t, scheme = random_table(seed), schemes.load(*which)
    trajectories = t.trajectories()
    gone = trajectories.of == seed % len(trajectories.tree)
    assume(not gone.all())
    made, without = scheme(lacking(t, gone)), scheme(t.only(~gone))
    tokens = t.per_token(gone)
    assert not made.advantages[tokens].any()
    np.testing.assert_allclose(made.advantages[~tokens], without.advantages, atol=1e-9)
    if without.returns is not None:
        np.testing.assert_allclose(targets(made)[~tokens], without.returns, atol=1e-12)


@pytest.mark.parametrize("which", EVERY, ids=str)
def test_a_batch_without_any_score_teaches_nothing(which: tuple[str, dict[str, Any]]) -> None:
    t, scheme = random_table(5), schemes.load(*which)
    nothing = scheme(lacking(t, np.ones(len(t), bool))).advantages
    assert nothing.shape == (int(t.tokens.sum()),)
    assert not nothing.any()


def test_missing_outcomes_by_hand() -> None:
    t = made_of(
        [1] * 5, {"outcome": [1, NO, 0, NO, 5], "reward": [1, NO, 0, NO, 5]}, tree=[0, 0, 0, 1, 1]
    )
    half = 0.5**0.5
    np.testing.assert_allclose(grpo.advantages(t, "outcome"), [half, 0, -half, 0, 0], atol=1e-6)
    np.testing.assert_allclose(slate_full.advantages(t), [half, 0, -half, 0, 0], atol=1e-6)
    np.testing.assert_allclose(rloo.advantages(t, "outcome"), [1, 0, -1, 0, 0])
    # 1, 0, 5: mean 2, population variance (1 + 4 + 9) / 3
    np.testing.assert_allclose(
        outcome.advantages(t), np.array([-1, 0, -2, 0, 3]) / (14 / 3) ** 0.5, atol=1e-7
    )
    # centred .5, -.5, 0: variance 1 / 6
    expected = np.array([0.5, 0, -0.5, 0, 0]) * 6**0.5
    np.testing.assert_allclose(reinforce_pp.advantages(t), expected, atol=1e-7)
    np.testing.assert_allclose(slate.advantages(t), [half, 0, -half, 0, 0], atol=1e-6)
    assert schemes.load("slate", {}).metrics(t) == {"learner/incomplete_trajectories": 2}
    assert schemes.load("grpo", {}).metrics(t) == {}


def test_a_return_is_missing_where_one_of_its_rewards_is() -> None:
    # 2 + 1, 1 + a missing reward, 0 + 1: the returns 3 and 1 are compared
    t = made_of([2, 2, 2], {"reward": [2, 1, 1, NO, 0, 1]})
    np.testing.assert_allclose(rloo.advantages(t), [2, 2, 0, 0, -2, -2])
    np.testing.assert_array_equal(t.trajectories().total(t.column("reward")), [3, NO, 1])
    assert schemes.load("rloo", {}).trains(t).tolist() == [True, True, False, False, True, True]


# The sample's and the population's standard deviation


@pytest.mark.parametrize(
    ("which", "option"),
    [
        (("gae", {}), "whiten_ddof"),
        (("ppr", {}), "whiten_ddof"),
        (("prime", {"accuracy_low": 0, "accuracy_high": 1}), "whiten_ddof"),
        (("reinforce_pp", {}), "whiten_ddof"),
        (("oprl", {"base": "reinforce_pp"}), "whiten_ddof"),
        (("oprl", {"base": "grpo", "variant": "process"}), "ddof"),
        (("outcome", {}), "ddof"),
        (("turn_grpo", {"n_min": 99}), "ddof"),
        (("mc_pr", {"n_min": 99}), "ddof"),
        (("vpr_v2", {}), "ddof"),
    ],
    ids=str,
)
def test_sample_and_population_deviation_differ_by_the_root_of_n_over_n_minus_one(
    which: tuple[str, dict[str, Any]], option: str
) -> None:
    t = random_table(11)
    population, sample = (
        schemes.load(which[0], which[1] | {option: ddof})(t).advantages for ddof in (0, 1)
    )
    n = {"outcome": len(t.trajectories().tree), "whiten_ddof": t.mask().sum()}
    n = n["whiten_ddof"] if option == "whiten_ddof" else n.get(which[0], len(t))
    if which == ("oprl", {"base": "grpo", "variant": "process"}):  # within each question
        n = t.per_token(np.bincount(t.tree)[t.tree])
    assert np.abs(population).max() > 0.1
    np.testing.assert_allclose(population, sample * np.sqrt(n / np.maximum(n - 1, 1)), atol=1e-4)


@pytest.mark.parametrize("which", EVERY, ids=str)
def test_a_scheme_reads_the_token_columns_it_needs_and_no_other_and_is_finite(
    which: tuple[str, dict[str, Any]],
) -> None:
    t, scheme = random_table(5), schemes.load(*which)
    needed = {
        name: column for name, column in t.token_scores.items() if name in scheme.needs.models
    }
    made = scheme(msgspec.structs.replace(t, token_scores=needed))
    assert made.advantages.shape == (int(t.tokens.sum()),)
    assert np.isfinite(made.advantages).all()
    assert (made.returns is not None) == ("value" in scheme.needs.models)
    for missing in needed:
        rest = {name: column for name, column in needed.items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            scheme(msgspec.structs.replace(t, token_scores=rest))
