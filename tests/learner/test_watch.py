"""The numerics watch: what it measures, and that each warning speaks exactly when its threshold is
passed."""

import numpy as np
import pytest

from coppice.learner.config import WatchConfig
from coppice.learner.update.watch import FIRST, Watch, effective_share, metrics


def measured(
    gap: list[float], staleness: list[int] | None = None, turn: list[int] | None = None,
    **columns: list[float],
) -> dict[str, float]:  # fmt: skip
    """The metrics of tokens with these log-ratios; ``columns`` replaces others."""
    n = len(gap)
    zeros, behaviour, stale = np.zeros(n), np.full(n, -1.0), np.array(staleness or [0] * n)
    plain = {"entropy": zeros + 0.5, "kl": zeros, "coefficient": zeros + 1, "cut": zeros}
    changed = {name: np.array(column) for name, column in columns.items()}
    turns = np.array(turn or [1] * n)
    return metrics(
        behaviour + gap, behaviour, staleness=stale, turn=turns, fresh=stale == 0, **plain | changed
    )


def test_equal_weights_are_worth_all_their_samples_and_one_huge_weight_is_worth_one() -> None:
    assert effective_share(np.full(7, 3.0)) == pytest.approx(1)
    assert effective_share(np.array([1e9, 1, 1, 1])) == pytest.approx(0.25)
    assert effective_share(np.array([1.0, 3])) == pytest.approx(16 / 20)
    assert effective_share(np.zeros(0)) == 1


def test_the_engine_gap_is_read_from_fresh_tokens_only() -> None:
    made = measured([0.01, -0.03, 5.0, -5.0], [0, 0, 1, 3])
    assert made["watch/engine_gap_mean"] == pytest.approx(0.02)
    assert made["watch/engine_gap_max"] == pytest.approx(0.03)
    assert made["watch/engine_gap_p99"] == pytest.approx(0.0298)
    assert made["learner/logprob_gap_max"] == pytest.approx(5)
    assert not [name for name in measured([0.5], [1]) if "engine_gap" in name]


def test_tokens_are_grouped_by_staleness_and_turn_and_the_far_end_shares_one_group() -> None:
    made = measured([0.1, 0.2, 0.3, 0.4], [0, 2, 8, 11], [1, 1, 9, 2])
    assert made["watch/staleness_0/gap_mean"] == pytest.approx(0.1)
    assert made["watch/staleness_8/tokens"] == 2
    assert made["watch/staleness_8/gap_mean"] == pytest.approx(0.35)
    assert made["watch/turn_1/tokens"] == 2
    assert made["watch/turn_8/gap_mean"] == pytest.approx(0.3)
    assert "watch/staleness_1/tokens" not in made


def test_no_tokens_measure_nothing_and_log_ratios_too_large_for_a_float_stay_finite() -> None:
    assert measured([]) == {}
    assert all(np.isfinite(v) for v in measured([800.0, -800.0, 0.0]).values())


# threshold, its value, the metric, a value within, a value past it, what the sentence must tell to
# do
LIMITS = [
    ("engine_gap", 0.05, "watch/engine_gap_p99", 0.05, 0.0501, "correction = 'tis'"),
    ("clip_share", 0.3, "learner/clip_share", 0.3, 0.301, "lower learner.lr"),
    ("mask_share", 0.3, "learner/mask_share", 0.3, 0.301, "lower scheduler.max_staleness"),
    ("kl", 1.0, "learner/kl", 1.0, 1.01, "raise learner.kl_coef"),
    ("sample_share", 0.5, "watch/sample_share", 0.5, 0.499, "truncate harder"),
    ("entropy", 0.01, "learner/entropy", 0.01, 0.0099, "raise learner.entropy_coef"),
]


@pytest.mark.parametrize(("threshold", "limit", "metric", "within", "past", "remedy"), LIMITS)
def test_a_warning_fires_exactly_past_its_threshold_and_zero_switches_it_off(
    threshold: str, limit: float, metric: str, within: float, past: float, remedy: str
) -> None:
    watch = Watch(WatchConfig(**{threshold: limit}))
    assert watch.warnings({metric: within}, None) == []
    (sentence,) = watch.warnings({metric: past}, None)
    assert f"watch.{threshold} = {limit:g}" in sentence
    assert remedy in sentence
    assert f"{past:.2g}"[:4] in sentence
    assert Watch(WatchConfig(**{threshold: 0.0})).warnings({metric: past}, None) == []


def test_rounding_of_bfloat16_is_no_engine_gap_there_but_one_in_float32() -> None:
    rounding, fault = ({"watch/engine_gap_p99": value} for value in (0.2, 0.41))
    assert len(Watch(WatchConfig()).warnings(rounding, None)) == 1
    assert Watch(WatchConfig(), bfloat16=True).warnings(rounding, None) == []
    (sentence,) = Watch(WatchConfig(), bfloat16=True).warnings(fault, None)
    assert "watch.engine_gap_bfloat16 = 0.4" in sentence


def test_a_gradient_norm_is_held_against_the_median_of_the_twenty_before_it() -> None:
    watch, off = (Watch(WatchConfig(grad_norm=limit)) for limit in (10.0, 0.0))
    for norm in (500.0, None, 1.0, 1.0, 1.0, 1.0, 10.0):  # nothing to compare with before five
        assert watch.warnings({}, norm) == off.warnings({}, norm) == []
    assert off.warnings({}, 1e6) == []
    (sentence,) = watch.warnings({}, 10.1)
    assert "watch.grad_norm = 10" in sentence
    assert "10 times its median" in sentence
    for _ in range(20):
        watch.warnings({}, 9.0)
    assert watch.warnings({}, 80.0) == []
    assert len(watch.warnings({}, 100.0)) == 1


def test_an_entropy_bonus_is_told_of_once_half_of_the_validity_is_lost() -> None:
    watch, off = Watch(WatchConfig(), bonus=0.01), Watch(WatchConfig())
    for share in (0.9, 1.0, 0.45):
        assert watch.warnings({"score/valid": share}, None) == watch.warnings({}, None) == []
    (sentence,) = watch.warnings({"score/valid": 0.44}, None)
    assert "0.440 of the actions are valid, 0.900 were at first" in sentence
    assert [off.warnings({"score/valid": share}, None) for share in (1.0, 0.0)] == [[], []]


def test_clipped_and_masked_shares_entropy_kl_and_coefficient_are_means_over_tokens() -> None:
    shares = measured(
        [0.0] * 4, turn=[1, 1, 2, 2], cut=[1, 2, 2, 0], entropy=[0.2, 0.4, 0.6, 0.8],
        kl=[0, 0, 0, 2.0], coefficient=[0, 0, 0, 1.0],
    )  # fmt: skip
    names = ("learner/clip_share", "learner/mask_share", "learner/kl", "watch/coefficient_mean")
    assert [shares[name] for name in names] == [0.25, 0.5, 0.5, 0.25]
    assert shares["learner/entropy"] == pytest.approx(0.5)
    assert (shares["watch/turn_1/clip_share"], shares["watch/turn_2/clip_share"]) == (0.5, 0)


KEYS: list[str] = [
    "ppr/turns_correct",
    "ppr/turns_wrong",
    "ppr/turn_pay_correct",
    "ppr/turn_pay_wrong",
]
PLAIN = (2.0, 2.0, 0.5, -0.3)


@pytest.mark.parametrize(
    ("later", "limit", "told"),
    [
        ([(3.7, 3.8, 0.6, 0.5)] * 5, 1.3, "normalisation = 'constant'"),
        # they shrink because turns cost
        ([(2.0, 1.5, 0.7, -0.4)] * 5, 1.3, "wrong trajectories"),
        ([(2.59, 2.0, 0.5, -0.3)] * 6, 1.3, ""),  # within the factor
        ([(3.0, 3.0, -0.1, -0.3)] * 6, 1.3, ""),  # longer, and turns do not pay: they are needed
        ([PLAIN, (3.5, 2.0, 0.5, -0.3), PLAIN], 1.3, ""),  # one odd update
        ([(9.0, 0.1, 0.5, -0.3)] * 5, 0.0, ""),
    ],
)
def test_a_side_effect_alone_is_told_with_its_remedy(
    later: list[tuple[float, ...]], limit: float, told: str
) -> None:
    watch = Watch(WatchConfig(turns=limit))
    rows = (dict(zip(KEYS, row, strict=True)) for row in [PLAIN] * FIRST + later)
    sentences = [sentence for row in rows for sentence in watch.warnings(row, None)]
    assert bool(sentences) == bool(told)
    assert all(told in sentence and "watch.turns = 1.3" in sentence for sentence in sentences)
