"""Each off-policy correction against a scalar computation, at every level and over every split into
micro-batches."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from coppice.learner.update import corrections
from coppice.learner.update.corrections import LEVELS, Level, Logprobs, Segments, Surrogate

EVERY = [(name, level) for name in corrections.CORRECTIONS for level in LEVELS]
SEEDS = st.integers(0, 2**32 - 1)


class Batch(NamedTuple):
    """Log-probabilities, advantages and the segment of each token at each level, all [tokens]."""

    current: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    advantage: np.ndarray
    segment: dict[Level, np.ndarray]


def batch(seed: int, far: float = 0.4, moved: float = 0.3, tokens: int = 14) -> Batch:
    """far: spread of proximal - behaviour; moved: of current - proximal. Two turns a sequence."""
    rng = np.random.default_rng(seed)
    behaviour = rng.uniform(-3, -0.1, tokens)
    proximal = behaviour + rng.normal(0, far, tokens)
    current = proximal + rng.normal(0, moved, tokens)
    turn = np.concatenate([np.arange(5), rng.integers(0, 5, tokens - 5)])  # every turn has a token
    segment: dict[Level, np.ndarray] = {
        "token": np.arange(tokens), "turn": turn, "sequence": turn // 2,
    }  # fmt: skip
    columns = (current, proximal, behaviour, rng.normal(0, 1, tokens))
    return Batch(*(column.astype(np.float32) for column in columns), segment=segment)


def whole(
    b: Batch, level: Level, chosen: np.ndarray | None = None
) -> tuple[Logprobs, torch.Tensor]:
    """What a correction reads of the chosen tokens (default all); current is a leaf."""
    there = np.ones(len(b.current), bool) if chosen is None else chosen
    ids = b.segment[level]
    away = np.where(there, 0.0, b.proximal - b.behaviour)
    segments = Segments(
        torch.as_tensor(ids[there]),
        torch.as_tensor(np.bincount(ids, weights=away)).float(),
        torch.as_tensor(np.bincount(ids)).float(),
    )
    current = torch.tensor(b.current[there], requires_grad=True)
    proximal, behaviour = torch.as_tensor(b.proximal[there]), torch.as_tensor(b.behaviour[there])
    return Logprobs(current, proximal, behaviour, {level: segments}), torch.as_tensor(
        b.advantage[there]
    )


def gradient(
    b: Batch, name: str, options: dict[str, Any], chosen: np.ndarray | None = None
) -> tuple[np.ndarray, Surrogate]:
    """d (sum of terms) / d current [chosen tokens], and the surrogate."""
    correct = corrections.load(name, options)
    logprobs, advantage = whole(b, options.get("level", correct.level), chosen)
    made = correct(logprobs, advantage)
    (slope,) = torch.autograd.grad(made.term.sum(), logprobs.current)
    return slope.numpy(), made


class Token(NamedTuple):
    """One token as the scalar formulas see it: ratios current / behaviour and proximal / behaviour
    of its segment, the geometric mean of the first, its own current / behaviour and current /
    proximal, and its advantage."""

    ratio: float
    old: float
    mean: float
    own: float
    near: float
    advantage: float


def seen(b: Batch, level: Level) -> list[Token]:
    made, own, near = [], b.current - b.behaviour, b.current - b.proximal
    for i in range(len(b.current)):
        mates = np.flatnonzero(b.segment[level] == b.segment[level][i])
        logs = [float(own[j]) for j in mates]
        old, total = sum(float(b.proximal[j]) - float(b.behaviour[j]) for j in mates), sum(logs)
        parts = (total, old, total / len(mates), float(own[i]), float(near[i]))
        made.append(Token(*map(math.exp, parts), advantage=float(b.advantage[i])))
    return made


Pair = tuple[float, float]
Formula = Callable[[Token], Pair]


def pessimistic(ratio: float, advantage: float, low: float, high: float, dual: float = 0.0) -> Pair:
    if advantage >= 0 and ratio > 1 + high:
        return (1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    if advantage < 0 and dual and ratio > dual:
        return dual * advantage, 0.0
    return ratio * advantage, ratio


def weighted(coefficient: float, t: Token) -> Pair:
    return coefficient * t.advantage, coefficient


def between(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def times(weight: float, t: Token, low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> Pair:
    """A weight of proximal / behaviour times PPO's clipped surrogate of current / proximal."""
    term, coefficient = pessimistic(t.near, t.advantage, low, high, dual)
    return weight * term, weight * coefficient


def inside(value: float, low: float, high: float) -> float:
    return value if low <= value <= high else 0.0


# name, options, (token -> term, coefficient): the formulas of each paper, for one token at a time
FORMULAS: list[tuple[str, dict[str, Any], Formula]] = [
    ("none", {}, lambda t: weighted(1.0, t)),
    ("ppo_clip", {}, lambda t: pessimistic(t.ratio, t.advantage, 0.2, 0.2, 3.0)),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5},
     lambda t: pessimistic(t.ratio, t.advantage, 0.1, 0.4, 1.5)),
    ("decoupled", {}, lambda t: times(inside(t.old, 0, 5), t)),
    ("decoupled", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2, "upper": 1.1},
     lambda t: times(inside(t.old, 0, 1.1), t, 0.1, 0.3, 1.2)),
    ("tis", {}, lambda t: times(min(t.old, 2.0), t)),
    ("tis", {"lower": 0.8, "upper": 1.3, "clip_low": 0.1},
     lambda t: times(between(t.old, 0.8, 1.3), t, 0.1)),
    ("aipo", {}, lambda t: weighted(min(t.ratio, 4.0), t)),
    ("aipo", {"upper": 1.2}, lambda t: weighted(min(t.ratio, 1.2), t)),
    ("cispo", {}, lambda t: weighted(min(t.ratio, 1.28), t)),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.1},
     lambda t: weighted(between(t.ratio, 0.7, 1.1), t)),
    ("icepop", {}, lambda t: times(inside(t.old, 0.5, 5), t)),
    ("icepop", {"lower": 0.9, "upper": 1.2, "clip_high": 0.1, "dual_clip": None},
     lambda t: times(inside(t.old, 0.9, 1.2), t, high=0.1, dual=0.0)),
    ("sequence_mask", {}, lambda t: weighted(inside(t.ratio, 0, 2), t)),
    ("sequence_mask", {"lower": 0.7, "upper": 1.4},
     lambda t: weighted(inside(t.ratio, 0.7, 1.4), t)),
    ("geometric_mask", {}, lambda t: weighted(t.own if 0.9 <= t.mean <= 1.1 else 0.0, t)),
    ("geometric_mask", {"lower": 0.7, "upper": 1.3},
     lambda t: weighted(t.own if 0.7 <= t.mean <= 1.3 else 0.0, t)),
    ("gspo", {}, lambda t: pessimistic(t.mean, t.advantage, 3e-4, 4e-4, 3.0)),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.1},
     lambda t: pessimistic(t.mean, t.advantage, 0.1, 0.2, 1.1)),
]  # fmt: skip


def test_every_correction_has_a_formula_here() -> None:
    assert {name for name, _, _ in FORMULAS} == set(corrections.CORRECTIONS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "options", "formula"), FORMULAS)
def test_terms_coefficients_and_gradients_are_those_of_the_formula_one_token_at_a_time(
    name: str, options: dict[str, Any], formula: Formula, level: Level
) -> None:
    for seed in range(6):
        b = batch(seed)
        slope, made = gradient(b, name, options | {"level": level})
        expected = [formula(t) for t in seen(b, level)]
        terms, coefficients = np.array(expected).T
        assert_allclose(made.term.detach(), terms, rtol=2e-5, atol=1e-6)
        assert_allclose(made.coefficient, coefficients, rtol=2e-5, atol=1e-6)
        assert_allclose(slope, coefficients * b.advantage, rtol=2e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from([(name, level) for name, level in EVERY if level != "token"]))
def test_a_split_segment_has_the_gradient_of_one_piece(seed: int, which: tuple[str, Level]) -> None:
    name, level = which
    # outside its micro-batch a segment counts with the policy of the start of the update
    b = batch(seed, moved=0)
    expected, together = gradient(b, name, {"level": level})
    here = np.random.default_rng(seed).random(len(b.current)) < 0.5
    for part in (here, ~here):
        if part.any():
            slope, made = gradient(b, name, {"level": level}, part)
            assert_allclose(slope, expected[part], rtol=1e-4, atol=1e-6)
            assert_allclose(
                made.coefficient, together.coefficient[torch.as_tensor(part)], rtol=1e-4
            )


def one(
    name: str, ratio: list[float], advantage: list[float] | None = None, **options: Any
) -> Surrogate:
    """Tokens of the given ratios current / behaviour, with proximal = behaviour."""
    zeros, gain = torch.zeros(len(ratio)), torch.tensor(advantage or [1.0] * len(ratio))
    return corrections.load(name, options)(Logprobs(torch.tensor(ratio).log(), zeros, zeros), gain)


def test_another_aggregation_than_that_of_the_correction_is_told() -> None:
    gspo = corrections.load("gspo", {})
    assert gspo.doubts(4, "auto") == gspo.doubts(4, "trajectory") == []
    assert len(gspo.doubts(4, "turn")) == 1


def test_masks_count_exactly_the_tokens_out_of_bounds_and_clips_are_no_masks() -> None:
    ratio, advantage = [0.4, 0.9, 1.0, 1.25, 5.1], [1.0, -1.0, 0.0, 1.0, -1.0]
    made = one("sequence_mask", ratio, level="token", lower=0.5, upper=5.0)
    assert made.masked.tolist() == [True, False, False, False, True]
    assert not made.clipped.any()
    clip = one("ppo_clip", ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert clip.clipped.tolist() == [False, False, False, True, True]
    assert not clip.masked.any()
    for name in ("none", "aipo", "cispo"):
        assert not (one(name, ratio).masked | one(name, ratio).clipped).any()


@pytest.mark.parametrize("far", [30.0, 500.0])
@pytest.mark.parametrize(("name", "level"), EVERY)
def test_extreme_log_ratios_leave_everything_finite(name: str, level: Level, far: float) -> None:
    for seed in range(3):
        b = batch(seed, far=far, moved=far)
        slope, made = gradient(b, name, {"level": level})
        assert np.isfinite(slope).all()
        assert torch.isfinite(made.term).all()
        assert torch.isfinite(made.coefficient).all()


def test_ratios_are_taken_over_tokens_but_for_the_corrections_of_sequences() -> None:
    sequences = {
        name for name in corrections.CORRECTIONS if corrections.load(name, {}).level == "sequence"
    }
    assert sequences == {"sequence_mask", "geometric_mask", "gspo"}


def test_a_plug_in_gets_the_policy_when_the_update_began() -> None:
    own, built_in = (
        corrections.Corrected(name, corrections.ppo_clip, {}, "token", corrections.Declared())
        for name in ("mine:own", "ppo_clip")
    )
    assert (own.needs_proximal(2), own.needs_proximal(1), built_in.needs_proximal(2)) == (
        True, False, False,
    )  # fmt: skip
