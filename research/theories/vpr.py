"""VPR (arXiv 2605.10325): the gradient of step labels, its bias under wrong labels, and its size
against an outcome reward.

Propositions 1 and 2 on a softmax policy of 7 states and 5 actions with random logits, a random
state distribution that does not depend on the policy, and random valid actions; Proposition 3 on H
independent steps with one shared logit. Source: VPR section 2.4 and appendices C-E; methods.md 5.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import log_softmax, softmax

from coppice.research.theories import ClaimRow, differences, show, zero

Array = NDArray[np.float64]
STATES, ACTIONS = 7, 5
FLIP_PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.4)
DRAWS = 300


class Problem(msgspec.Struct, frozen=True):
    """A decision problem: logits and labels, [states, actions], and the probability of each state,
    [states]."""

    logits: Array
    labels: Array
    visits: Array

    def policy(self) -> Array:
        """Return the action probabilities, [states, actions]."""
        return softmax(self.logits, axis=-1)

    def scores(self) -> Array:
        """Return the gradient of log pi(a|s) by the logits of s, [states, actions, actions]. By
        other logits it is zero."""
        return np.eye(self.logits.shape[1]) - self.policy()[:, None, :]


def problem(rng: np.random.Generator) -> Problem:
    """Draw a random problem. Each action is valid with probability one half."""
    labels = (rng.random((STATES, ACTIONS)) < 0.5).astype(np.float64)
    return Problem(rng.normal(size=(STATES, ACTIONS)), labels, rng.dirichlet(np.ones(STATES)))


def score_gradient(task: Problem, weights: Array) -> Array:
    """Return E over states and actions of weights(s, a) times the score, [states, actions]."""
    return np.einsum("s,sa,sa,sab->sb", task.visits, task.policy(), weights, task.scores())


def gradient_gaps(task: Problem, rng: np.random.Generator) -> list[float]:
    """Return the largest differences from the gradient of J by central differences, [3]: of the
    score form, of the score form with a random baseline b(s), of the gradient of E_old[label log
    pi]."""

    def verified(logits: Array) -> float:
        policy = softmax(logits, axis=-1)
        return float(np.einsum("s,sa,sa->", task.visits, policy, task.labels))

    def imitated(logits: Array) -> float:
        weights = task.policy() * task.labels
        return float(np.einsum("s,sa,sa->", task.visits, weights, log_softmax(logits, axis=-1)))

    gradient = differences(verified, task.logits)
    score = score_gradient(task, task.labels)
    baselined = score_gradient(task, task.labels - rng.normal(size=(len(task.visits), 1)))
    imitation = differences(imitated, task.logits)
    return [float(np.abs(form - gradient).max()) for form in (score, baselined, imitation)]


def bias(task: Problem, flipped: Array) -> tuple[float, float, float]:
    """Return the norm of the gradient's bias, eps and Gmax of Proposition 2 when the labels
    ``flipped`` are inverted.

    ``flipped`` is 0 or 1, [states, actions]; eps is its mass under visits and policy, Gmax the
    largest score norm.
    """
    wrong = np.where(flipped > 0, 1 - task.labels, task.labels)
    shift = score_gradient(task, wrong) - score_gradient(task, task.labels)
    mass = float(np.einsum("s,sa,sa->", task.visits, task.policy(), flipped))
    return float(np.linalg.norm(shift)), mass, float(np.linalg.norm(task.scores(), axis=-1).max())


def coherent_flips(states: int = 10, probability: float = 0.3) -> Array:
    """Return the norm of the bias over eps Gmax when all states share one logit and one label is
    inverted in ever more states, [states].

    The score of that action is 1 - p in every state, so all wrong labels pull in one direction. For
    p < 1/2 this score is also the largest.
    """
    scores = np.array([1 - probability, -probability])
    weights = np.array([probability, 1 - probability])
    flipped = np.tri(states)[..., None] * np.array([1, 0])
    shift = np.abs((flipped * weights * scores).sum(axis=(1, 2))) / states
    mass = (flipped * weights).sum(axis=(1, 2)) / states
    return shift / (mass * np.abs(scores).max())


def signals(probability: float, horizon: int) -> tuple[float, float]:
    """Return the expected gradients from step labels and from success of all steps, summed over K
    right steps of ``horizon``.

    Scores are a_t - p, so their sum is K - H p; labels are a_t; success is K = H (VPR appendix E,
    step 2).
    """
    right = np.arange(horizon + 1)
    chances = stats.binom.pmf(right, horizon, probability)
    process = chances @ right * (1 - probability)
    outcome = chances[-1] * horizon * (1 - probability)
    return float(process), float(outcome)


def rows(seed: int = 0) -> list[ClaimRow]:
    """Return VPR's rows of methods.md 5."""
    rng = np.random.default_rng(seed)
    task = problem(rng)
    return [*_proposition_1(task, rng), *_proposition_2(task, rng), *_proposition_3()]


def _proposition_1(task: Problem, rng: np.random.Generator) -> list[ClaimRow]:
    forms = "score form", "score form with a random baseline", "gradient of filtered imitation"
    return [
        zero(f"VPR Prop 1: finite differences of J against the {form}", gap, 1e-9)
        for form, gap in zip(forms, gradient_gaps(task, rng), strict=True)
    ]


def _proposition_2(task: Problem, rng: np.random.Generator) -> list[ClaimRow]:
    shape = (len(FLIP_PROBABILITIES), DRAWS, *task.labels.shape)
    flips = rng.random(shape) < np.reshape(FLIP_PROBABILITIES, (-1, 1, 1, 1))
    draws = np.array([[bias(task, flipped) for flipped in rate] for rate in flips])
    norm, mass, largest = np.concatenate(draws).T
    broken = int((norm > mass * largest * (1 + 1e-12)).sum())
    few, many = draws[0].mean(axis=0), draws[-1].mean(axis=0)
    falls = bool(many[0] / many[1] < few[0] / few[1])
    ratio = coherent_flips()
    measured = f"{few[0]:.3f} at {few[1]:.3f}, {many[0]:.3f} at {many[1]:.3f}"
    one, ends = bool(np.allclose(ratio, 1)), [ratio.min(), ratio.max()]
    claims = (
        f"VPR Prop 2: ||bias|| > eps Gmax, of {len(norm):,} draws",
        "VPR Prop 2: mean ||bias|| at the mean eps, flip rates .05 and .4",
        "VPR Prop 2: ||bias|| / (eps Gmax), coherent flips, least / most",
    )
    return [
        ClaimRow(claims[0], str(broken), "0", broken == 0),
        ClaimRow(claims[1], measured, "sub-linear", falls),
        ClaimRow(claims[2], show(ends), show([1, 1]), one),
    ]


def _proposition_3() -> list[ClaimRow]:
    results, probability = [], 0.9
    for horizon in (10, 50, 100):
        measured, step = signals(probability, horizon), horizon * (1 - probability)
        expected = (step * probability, step * probability**horizon)
        claim = f"VPR Prop 3: signal of step labels / of the outcome, p=.9, H={horizon}"
        agrees = bool(np.allclose(measured, expected, rtol=1e-9))
        results.append(ClaimRow(claim, show(measured, 6), show(expected, 6), agrees))
    return results
