"""The length watch speaks on what the arms of docs/replication/ppr.md really did, and not where
nothing is wrong."""

import pytest

from coppice.learner.update.lengths import FIRST, Lengths

LIMIT = 1.3
# Turns and pay per turn of correct and of wrong trajectories, update by update, as runs of the
# miniature recorded them (seed 0, training at temperature 1).
RECORDED = {
    "w/o Norm": [
        (2.75, 2.75, 0.64, 0.49), (2.67, 3.16, 0.6, 0.5), (3.29, 3.39, 0.62, 0.51), (3.67, 3.78, 0.56, 0.56), (4.0, 3.92, 0.71, 0.57),
        (3.33, 3.86, 0.52, 0.59), (3.75, 3.88, 0.58, 0.56),
    ],
    "Rescale": [
        (2.75, 2.75, 0.44, 0.3), (3.0, 3.07, 0.37, 0.26), (3.12, 3.29, 0.28, 0.24), (2.75, 3.7, 0.48, 0.19), (3.25, 3.68, 0.3, 0.2),
        (3.0, 3.77, 0.36, 0.22), (3.25, 3.87, 0.27, 0.2), (4.0, 3.88, 0.17, 0.21), (4.0, 3.91, 0.15, 0.21),
    ],
    "ReNorm": [
        (2.75, 2.75, 0.64, -0.51), (2.14, 2.3, 0.81, -0.39), (2.12, 1.96, 0.83, -0.27), (2.0, 1.97, 0.78, -0.17), (2.09, 1.85, 0.61, -0.43),
        (2.0, 1.79, 0.67, -0.43),
    ],
}  # fmt: skip
KEYS = ("ppr/turns_correct", "ppr/turns_wrong", "ppr/turn_pay_correct", "ppr/turn_pay_wrong")


def said(series: list[tuple[float, ...]], limit: float = LIMIT) -> list[str]:
    """All that is said over a run."""
    lengths = Lengths()
    return [s for row in series for s in lengths.warnings(dict(zip(KEYS, row, strict=True)), limit)]


PLAIN = (2.0, 2.0, 0.5, -0.3)


@pytest.mark.parametrize(
    ("arm", "told"),
    [
        ("w/o Norm", "normalisation = 'constant'"),
        ("Rescale", "normalisation = 'constant'"),
        ("ReNorm", "wrong trajectories"),  # they shrink because turns cost
    ],
)
def test_what_the_arms_did_is_told_with_its_remedy(arm: str, told: str) -> None:
    sentences = said(RECORDED[arm])
    assert sentences
    assert all(told in sentence for sentence in sentences)
    assert "watch.turns = 1.3" in sentences[0]


def test_success_that_grows_while_failure_costs_points_to_the_normalisation() -> None:
    (sentence,) = said([PLAIN] * FIRST + [(2.7, 2.0, 0.5, -0.3)] * 3)
    assert "correct trajectories have 2.7 turns, 1.35 times" in sentence
    assert "normalisation = 'sample'" in sentence


@pytest.mark.parametrize(
    ("later", "limit"),
    [
        ([(2.59, 2.0, 0.5, -0.3)] * 6, LIMIT),  # within the factor
        ([(3.0, 3.0, -0.1, -0.3)] * 6, LIMIT),  # longer, and turns do not pay: they are needed
        ([(1.0, 2.0, 0.5, -0.3)] * 6, LIMIT),  # success in fewer turns
        ([PLAIN, (3.5, 2.0, 0.5, -0.3), PLAIN], LIMIT),  # one odd update
        ([(9.0, 0.1, 0.5, -0.3)] * 5, 0.0),
    ],
)
def test_what_is_no_side_effect_is_not_told(later: list[tuple[float, ...]], limit: float) -> None:
    assert said([PLAIN] * FIRST + later, limit) == []


def test_a_batch_without_a_group_changes_nothing() -> None:
    lengths = Lengths()
    for _ in range(FIRST):
        lengths.warnings({"ppr/turns_wrong": 2.0}, LIMIT)
    assert lengths.warnings({"ppr/turns_correct": 9.0, "ppr/turn_pay_correct": 0.5}, LIMIT) == []
    assert lengths.first == {"correct": [9.0], "wrong": [2.0, 2.0]}
