"""The claims of four papers: every row of coppice dev theory agrees, and the numbers that a person
can work out are those of the code."""

import math

import numpy as np
import pytest

from coppice.research.theories import ClaimRow, main, oprl, ppr, slate, vpr

GROUPS = 20_000
SLOW = {"slate": slate, "ppr": ppr, "vpr": vpr, "oprl": oprl}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.slow
@pytest.mark.parametrize("paper", SLOW)
def test_every_row_agrees_with_other_draws_too(paper: str) -> None:
    assert [row.claim for row in SLOW[paper].rows(seed=1) if not row.agrees] == []


@pytest.mark.parametrize(("horizon", "expected"), [(2, 1 / 3.25), (4, 1 / 13.5), (8, 1 / 71)])
def test_slate_theorem_1_the_variance_is_one_t_th_of_independent_steps_and_less_of_dependent_ones(
    horizon: int, expected: float, rng: np.random.Generator
) -> None:
    assert slate.variance_ratio(slate.independent, horizon, rng, GROUPS).near(1 / horizon)
    assert slate.variance_ratio(slate.prefix_dependent, horizon, rng, GROUPS).near(expected)


def test_slate_theorem_1_fails_where_its_assumptions_do(rng: np.random.Generator) -> None:
    assert slate.variance_ratio(slate.cancelling, 4, rng, GROUPS).near(1)
    assert slate.future_covariance(slate.cancelling, 4, rng, GROUPS).near(-slate.NOISE.var())
    assert slate.negated_variances(rng, GROUPS).near([0.8 * slate.NOISE.var(), 0])
    assert slate.chosen_share() == pytest.approx(0.89943, abs=1e-5)  # 0.5 under the policy
    assert slate.extended_variances(rng, GROUPS).near([7.2 * slate.chosen_share(), 4.4])


@pytest.mark.parametrize(
    ("horizon", "group", "quoted"), [(4, 20, 0.842), (2, 10, 0.889), (5, 50, 0.918)]
)
def test_slate_proposition_2_is_an_inequality(
    horizon: int, group: int, quoted: float, rng: np.random.Generator
) -> None:
    expected = (1 - horizon / group) / (1 - 1 / group)
    assert expected == pytest.approx(quoted, abs=5e-4)
    assert slate.mean_advantage_ratio(horizon, group, rng, 4000).near(expected)


def test_ppr_class_gap_variance_and_product_form_are_those_of_the_distribution(
    rng: np.random.Generator,
) -> None:
    exact = ppr.exact_moments()
    quoted = [exact.class_gap + 1, exact.renorm_variance(), exact.covariance]
    assert quoted == pytest.approx([1.214, 0.3676, 0.0488], abs=3e-4)
    assert exact.variance_bound() == pytest.approx(0.395, abs=5e-4)
    assert ppr.estimates(rng, 100_000).near(quoted)


@pytest.mark.parametrize(
    ("horizon", "process", "outcome"), [(10, 0.9, 0.3487), (50, 4.5, 0.02577), (100, 9, 0.000266)]
)
def test_vpr_proposition_3_step_labels_grow_with_the_horizon_and_the_outcome_signal_dies(
    horizon: int, process: float, outcome: float
) -> None:
    assert vpr.signals(0.9, horizon) == pytest.approx((process, outcome), rel=2e-3)
    assert vpr.outcome_peak(0.9) == pytest.approx(-1 / math.log(0.9), abs=0.01)


@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_oprl_theorem_3_3_with_its_own_assumption_gives_utility_over_beta(
    beta: float, rng: np.random.Generator
) -> None:
    found = oprl.telescoped(rng, 1 / beta, beta)
    assert oprl.deviation(found.totals - found.utilities / beta) < oprl.FITTED
    off = oprl.deviation(found.totals - found.utilities)
    assert off == pytest.approx((1 / beta - 1) * oprl.deviation(found.utilities), abs=oprl.FITTED)


def test_the_command_prints_a_table_and_returns_1_when_a_row_disagrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vpr"]) == 0
    assert "VPR Prop 3" in capsys.readouterr().out
    monkeypatch.setattr(vpr, "rows", lambda seed: [ClaimRow("a claim", "1", "2", False)])
    assert main(["vpr"]) == 1
    assert "NO" in capsys.readouterr().out
    assert main(["nobody"]) == 2
