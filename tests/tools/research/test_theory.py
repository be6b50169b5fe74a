"""The claims of four papers, each measured from its definitions with small samples; a test's name
is what was found.

Sampled values are compared within STANDARD_ERRORS of their own standard error, exact ones within
rounding.
"""

import math
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from coppice.research.theories import STANDARD_ERRORS, Row, differences, main, oprl, ppr, slate, vpr

GROUPS = 20_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("horizon", slate.HORIZONS)
def test_slate_theorem_1_independent_steps_have_exactly_one_t_th_of_the_variance(
    horizon: int, rng: np.random.Generator
) -> None:
    assert slate.variance_ratio(slate.independent, horizon, rng, GROUPS).near(1 / horizon)


@pytest.mark.parametrize(("horizon", "expected"), [(2, 1 / 3.25), (4, 1 / 13.5), (8, 1 / 71)])
def test_slate_theorem_1_prefix_dependent_means_have_less(
    horizon: int, expected: float, rng: np.random.Generator
) -> None:
    ratio = slate.variance_ratio(slate.prefix_dependent, horizon, rng, GROUPS)
    assert ratio.near(expected)
    assert expected < 1 / horizon


def test_slate_theorem_1_holds_at_every_step_and_not_only_on_average(
    rng: np.random.Generator,
) -> None:
    truncated, full = slate.variances(
        slate.prefix_dependent, 4, slate.GROUP, slate.GROUP, GROUPS, rng
    )
    assert (truncated <= full / 4).all()


def test_slate_theorem_1_fails_when_steps_cancel_the_past_and_assumption_1_is_broken(
    rng: np.random.Generator,
) -> None:
    assert slate.variance_ratio(slate.cancelling, 4, rng, GROUPS).near(1)
    assert slate.future_covariance(slate.cancelling, 4, rng, GROUPS).near(-slate.NOISE.var())


def test_slate_theorem_1_equation_8_fails_when_the_second_step_is_minus_the_first(
    rng: np.random.Generator,
) -> None:
    assert slate.negated_variances(rng, GROUPS).near([0.8 * slate.NOISE.var(), 0])


def test_slate_theorem_1_equation_8_fails_for_prefixes_that_slate_itself_extends(
    rng: np.random.Generator,
) -> None:
    assert slate.chosen_share() == pytest.approx(0.89943, abs=1e-5)  # 0.5 under the policy
    assert slate.extended_variances(rng, GROUPS).near([7.2 * slate.chosen_share(), 4.4])


@pytest.mark.parametrize("horizon", slate.HORIZONS)
def test_slate_a_full_trajectory_advantage_correlates_as_one_over_root_t_with_the_step(
    horizon: int, rng: np.random.Generator
) -> None:
    measured = slate.correlations(horizon, rng, GROUPS)
    assert measured.at(0).near(horizon**-0.5)
    assert measured.value[2] == pytest.approx(1)


def test_slate_after_division_by_the_std_the_gain_is_in_correlation_and_not_in_scale(
    rng: np.random.Generator,
) -> None:
    measured = slate.correlations(4, rng, GROUPS)
    _, full, _, truncated, *scales = measured.value
    assert scales == pytest.approx([1, 1])
    assert full <= 0.5 + STANDARD_ERRORS * measured.error[1]
    assert truncated > 0.9


@pytest.mark.parametrize(
    ("horizon", "group", "quoted"), [(4, 20, 0.842), (2, 10, 0.889), (5, 50, 0.918)]
)
def test_slate_proposition_2_is_an_inequality(
    horizon: int, group: int, quoted: float, rng: np.random.Generator
) -> None:
    expected = (1 - horizon / group) / (1 - 1 / group)
    assert expected == pytest.approx(quoted, abs=5e-4)
    assert slate.mean_advantage_ratio(horizon, group, rng, 4000).near(expected)


def test_slate_the_mean_of_centred_advantages_is_always_zero(rng: np.random.Generator) -> None:
    values = slate.centred(slate.candidates(slate.prefix_dependent, 4, 5, 100, rng))
    assert np.abs(values.mean(axis=-1)).max() < 1e-12


def test_ppr_renorm_stays_in_range_and_has_the_sign_of_the_outcome(
    rng: np.random.Generator,
) -> None:
    scores, outcomes = ppr.sample(GROUPS, rng)
    assert ppr.sign_violations(ppr.renorm(scores, outcomes), outcomes) == 0
    assert (
        ppr.sign_violations(
            ppr.renorm(np.array([0.0, 1.0]), np.array([1.0, 0.0])), np.array([1.0, 0.0])
        )
        == 0
    )


def test_ppr_sample_centring_breaks_the_sign_rule(rng: np.random.Generator) -> None:
    scores, outcomes = ppr.sample(GROUPS, rng)
    assert ppr.sign_violations(scores - scores.mean() + outcomes - outcomes.mean(), outcomes) > 0


def test_ppr_class_gap_variance_and_product_form_are_those_of_the_distribution(
    rng: np.random.Generator,
) -> None:
    exact = ppr.exact_moments()
    quoted = [exact.class_gap + 1, exact.renorm_variance(), exact.covariance]
    assert quoted == pytest.approx([1.214, 0.3676, 0.0488], abs=3e-4)
    assert exact.variance_bound() == pytest.approx(0.395, abs=5e-4)
    assert ppr.estimates(rng, 100_000).near(quoted)


def test_ppr_mean_and_variance_identities_are_exact_and_centring_leaves_the_variance(
    rng: np.random.Generator,
) -> None:
    scores, outcomes = ppr.sample(GROUPS, rng)
    moments, rewards = ppr.sample_moments(scores, outcomes), ppr.renorm(scores, outcomes)
    assert rewards.mean() == pytest.approx(moments.score_mean + moments.outcome_mean - 1, abs=1e-12)
    assert rewards.var() == pytest.approx(moments.renorm_variance(), abs=1e-12)
    assert (rewards - rewards.mean()).var() == pytest.approx(rewards.var(), abs=1e-12)
    assert rewards.var() <= moments.variance_bound()


def test_ppr_objective_alignment_is_false_as_a_sum_and_true_as_a_product(
    rng: np.random.Generator,
) -> None:
    scores, outcomes = ppr.sample(GROUPS, rng)
    score, outcome = scores - scores.mean(), outcomes - outcomes.mean()
    assert (score + outcome).mean() == pytest.approx(0, abs=1e-12)
    covariance = float(np.cov(scores, outcomes, ddof=0)[0, 1])
    assert (score * outcome).mean() == pytest.approx(covariance, abs=1e-12)
    assert covariance > 0.04


@pytest.mark.parametrize(
    ("outcome", "score", "returns"), [(1, 1.0, [3.0, 5.0]), (0, 0.8, [-0.4, -0.8])]
)
def test_ppr_more_turns_raise_the_return_after_success_and_lower_it_after_failure(
    outcome: int, score: float, returns: list[float]
) -> None:
    assert [ppr.episode_return(outcome, score, turns) for turns in (2, 4)] == pytest.approx(returns)


def test_vpr_proposition_1_four_forms_of_the_gradient_are_equal(rng: np.random.Generator) -> None:
    *against_differences, baseline = vpr.gradient_gaps(vpr.problem(rng), rng)
    assert max(against_differences) < 1e-9
    assert baseline < 1e-14


def test_vpr_proposition_2_the_bias_never_exceeds_its_bound_and_random_flips_are_sublinear(
    rng: np.random.Generator,
) -> None:
    task = vpr.problem(rng)
    few, many = (vpr.random_flips(task, probability, rng) for probability in (0.05, 0.4))
    norm, mass, largest = np.concatenate([few, many]).T
    assert (norm <= mass * largest * (1 + 1e-12)).all()
    slopes = [draws[:, 0].mean() / draws[:, 1].mean() for draws in (few, many)]
    assert slopes[1] < slopes[0]


def test_vpr_proposition_2_is_an_equality_for_coherent_flips() -> None:
    norm, mass, largest = vpr.coherent_flips().T
    assert norm == pytest.approx(mass * largest)


@pytest.mark.parametrize(
    ("horizon", "process", "outcome"), [(10, 0.9, 0.3487), (50, 4.5, 0.02577), (100, 9, 0.000266)]
)
def test_vpr_proposition_3_step_labels_grow_with_the_horizon_and_the_outcome_signal_dies(
    horizon: int, process: float, outcome: float
) -> None:
    measured = vpr.signals(0.9, horizon)
    assert measured == pytest.approx((horizon * 0.09, horizon * 0.9**horizon * 0.1))
    assert measured == pytest.approx((process, outcome), rel=2e-3)


def test_vpr_proposition_3_signals_are_the_gradients_of_both_objectives_by_the_shared_logit() -> (
    None
):
    logit, horizon = np.array([math.log(9)]), 10
    process = differences(lambda z: horizon / (1 + math.exp(-float(z[0]))), logit)[0]
    outcome = differences(lambda z: (1 + math.exp(-float(z[0]))) ** -horizon, logit)[0]
    assert vpr.signals(0.9, horizon) == pytest.approx((process, outcome))


def test_vpr_proposition_3_the_outcome_signal_peaks_at_minus_one_over_log_p() -> None:
    assert vpr.outcome_peak(0.9) == pytest.approx(-1 / math.log(0.9), abs=0.01)


def test_oprl_theorem_3_3_holds_for_preferences_without_beta_and_is_potential_shaping(
    rng: np.random.Generator,
) -> None:
    found = oprl.telescoped(rng, 1.0)
    assert oprl.spread(found.totals - found.utilities) < oprl.FITTED
    assert found.shaping_gap < oprl.FITTED


@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_oprl_theorem_3_3_with_its_own_assumption_gives_utility_over_beta(
    beta: float, rng: np.random.Generator
) -> None:
    found = oprl.telescoped(rng, 1 / beta, beta)
    assert oprl.spread(found.totals - found.utilities / beta) < oprl.FITTED
    off = oprl.spread(found.totals - found.utilities)
    assert off == pytest.approx((1 / beta - 1) * oprl.spread(found.utilities), abs=oprl.FITTED)


def test_oprl_theorem_3_3_the_extra_term_for_another_reference_is_exact(
    rng: np.random.Generator,
) -> None:
    without, with_term = oprl.stale_reference(rng)
    assert without > 0.1
    assert with_term < oprl.FITTED


def test_oprl_theorem_3_3_fails_when_transitions_are_random(rng: np.random.Generator) -> None:
    assert oprl.chance_residual(rng) > 0.01


def test_oprl_proposition_3_4_one_step_is_a_kl_descent_step(rng: np.random.Generator) -> None:
    assert oprl.one_step_gap(rng) < 1e-9


def test_oprl_proposition_3_4_two_steps_need_the_reward_to_go(rng: np.random.Generator) -> None:
    to_go, divergence, immediate = oprl.multi_step_gaps(rng)
    assert max(to_go, divergence) < 1e-9
    assert immediate > 1e-4


def test_oprl_proposition_3_4_bounds_the_reward_from_above_and_not_its_size(
    rng: np.random.Generator,
) -> None:
    old, phi = np.log([[0.5, 0.5]]), np.log([[0.999, 0.001]])
    assert (phi - old).min() == pytest.approx(-6.21, abs=0.005)
    upper, absolute, wider = oprl.bound_ratios(old, phi)
    assert upper < 1 < absolute
    assert wider <= 1
    upper, _, wider = oprl.bound_ratios(*oprl.log_softmax(2 * rng.normal(size=(2, 1000, 3))))
    assert max(upper, wider) <= 1


def test_the_command_prints_a_table_and_returns_1_when_a_row_disagrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vpr"]) == 0
    assert "VPR Prop 3" in capsys.readouterr().out
    monkeypatch.setattr(vpr, "rows", lambda seed: [Row("a claim", "1", "2", False)])
    assert main(["vpr"]) == 1
    assert "NO" in capsys.readouterr().out
    assert main(["nobody"]) == 2


@pytest.mark.slow
def test_the_plots_are_well_formed_and_the_same_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools.research.theories, "_module", {"ppr": ppr, "oprl": oprl}.__getitem__)
    for name in ("a", "b"):
        assert main(["ppr", "oprl", "--figures", str(tmp_path / name)]) == 0
    for plot in ("theory-ppr.svg", "theory-oprl.svg"):
        xml.etree.ElementTree.parse(tmp_path / "a" / plot)
        assert (tmp_path / "a" / plot).read_bytes() == (tmp_path / "b" / plot).read_bytes()
