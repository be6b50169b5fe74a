"""The bias and the noise of every off-policy correction as its data gets older, without sampling
error.

A sequence has four tokens of three choices, in two turns of two tokens. One third of the sequences
succeed (return 1). The policy has one row of logits per pair of position and previous token, so
learning on one sequence moves the policy on others. All 81 sequences are enumerated, so the policy
gradient is exact, and so are the mean and the variance of a correction's gradient estimate from a
sequence that an older policy sampled. ``behaviour`` is the policy that sampled. ``current`` is
ahead of it by a number of exact gradient steps, the staleness. The proximal policy equals
``current``, as at the start of an update. The advantage is the return minus the mean return under
``behaviour``, as a large group would measure it.
"""

from functools import cache

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax

from coppice.learner.update.corrections import (
    CORRECTIONS,
    LEVELS,
    Corrected,
    Logprobs,
    Segments,
    load,
)
from coppice.learner.update.targets import gae, retrace, vtrace
from coppice.research.theories import ClaimRow, magnitude, show

Array = NDArray[np.float64]
ACTIONS, TOKENS, TOKENS_PER_TURN = 3, 4, 2
SEQUENCES, STATES = ACTIONS**TOKENS, 1 + ACTIONS * (TOKENS - 1)
STALENESS = (0, 1, 2, 4, 8, 16)
SHOWN = 8  # the staleness at which corrections are compared with each other
# sixteen steps double the chance of success and move the policy past every default bound
STEP = 1.5
TASKS = 10  # every number is a mean over this many random tasks
UNTRUNCATED = 1e9  # a bound that no ratio comes near
BOUNDS = (1.0, 2.0, UNTRUNCATED)
EXACT = 1e-12  # rounding error of an identity
UNBIASED = load("tis", {"level": "sequence", "upper": UNTRUNCATED})


class TokenTask(msgspec.Struct, frozen=True):
    """The return of every sequence, [sequences], and the logits of the policy that samples the
    sequences, [states, actions]."""

    returns: Array
    behaviour: Array


class Bias(msgspec.Struct, frozen=True):
    """An estimator of the gradient, in units of the exact gradient's norm: the norm of its bias,
    the cosine between its mean and the exact gradient, and the standard deviation of one sequence's
    estimate (the root of the summed variances)."""

    bias: float
    cosine: float
    deviation: float


Stale = list[tuple[TokenTask, Array]]  # tasks, each with the current logits


@cache
def paths() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the states and actions of the sequences in lexicographic order, [sequences, tokens]
    each."""
    actions = np.indices((ACTIONS,) * TOKENS).reshape(TOKENS, SEQUENCES).T
    states = np.zeros_like(actions)
    states[:, 1:] = 1 + ACTIONS * np.arange(TOKENS - 1) + actions[:, :-1]
    return states, actions


def random_task(rng: np.random.Generator) -> TokenTask:
    """Draw a task: a random third of the sequences succeeds, and the logits are standard normal."""
    returns = np.zeros(SEQUENCES)
    returns[rng.permutation(SEQUENCES)[: SEQUENCES // 3]] = 1
    return TokenTask(returns, rng.normal(size=(STATES, ACTIONS)))


def log_probs(logits: Array) -> Array:
    """Return log pi of every token, [sequences, tokens]."""
    return log_softmax(logits, axis=1)[paths()]


def chances(logits: Array) -> Array:
    """Return the probabilities of the sequences, [sequences]."""
    return np.exp(log_probs(logits).sum(axis=1))


def given_prefix(logits: Array, values: Array) -> Array:
    """Return E[values | the tokens before t], [sequences, tokens]. Column t of ``values``
    [sequences, tokens] is averaged over the sequences with the same first t tokens."""
    chance, means = chances(logits), np.empty((SEQUENCES, TOKENS))
    for t in range(TOKENS):
        block, weight = values[:, t].reshape(ACTIONS**t, -1), chance.reshape(ACTIONS**t, -1)
        means[:, t] = np.repeat((block * weight).sum(axis=1) / weight.sum(axis=1), block.shape[1])
    return means


def values(task: TokenTask, logits: Array) -> Array:
    """Return V before every token: the expected return of the policy with ``logits`` after that
    prefix, [sequences, tokens]."""
    return given_prefix(logits, _each_token(task.returns))


def estimates(logits: Array, weights: Array) -> Array:
    """Return each sequence's sum over tokens of weight x score, [sequences, states, actions].
    weights: [sequences, tokens]."""
    states, actions = paths()
    scores = np.eye(ACTIONS)[actions] - softmax(logits, axis=1)[states]
    gradients = np.zeros((SEQUENCES, STATES, ACTIONS))
    # no state comes twice in a sequence
    gradients[np.arange(SEQUENCES)[:, None], states] = weights[..., None] * scores
    return gradients


def exact_gradient(task: TokenTask, logits: Array) -> Array:
    """Return the gradient of the mean return by the logits, [states, actions]."""
    return np.tensordot(chances(logits), estimates(logits, _each_token(task.returns)), axes=1)


def stale(tasks: list[TokenTask], staleness: int) -> Stale:
    """Return each task with the logits that are ``staleness`` exact gradient steps ahead of its
    behaviour policy."""
    pairs = []
    for task in tasks:
        logits = task.behaviour
        for _ in range(staleness):
            logits = logits + STEP * exact_gradient(task, logits)
        pairs.append((task, logits))
    return pairs


def token_weights(
    correction: Corrected, current: Array, behaviour: Array, advantages: Array
) -> Array:
    """Return the derivative of each token's surrogate by its log current, [sequences, tokens].
    current and behaviour are log-probabilities; they and ``advantages`` are [sequences, tokens]."""
    leaf = torch.from_numpy(current.ravel()).requires_grad_()
    segments = {"turn": _segments(TOKENS_PER_TURN), "sequence": _segments(TOKENS)}
    logprobs = Logprobs(leaf, leaf.detach(), torch.from_numpy(behaviour.ravel()), segments)
    with torch.enable_grad():
        term = correction(logprobs, torch.from_numpy(advantages.ravel())).term
        (gradient,) = torch.autograd.grad(term.sum(), leaf)
    return gradient.numpy().reshape(SEQUENCES, TOKENS)


def measure(
    task: TokenTask, logits: Array, correction: Corrected, baseline: Array | None = None
) -> Bias:
    """Compare the correction's gradient over the sequences of ``behaviour`` with the exact gradient
    at ``logits``. baseline: the logits of the policy whose mean return is subtracted, by default
    ``behaviour``."""
    chance = chances(task.behaviour)
    mean_return = (chance if baseline is None else chances(baseline)) @ task.returns
    advantages = _each_token(task.returns - mean_return)
    weights = token_weights(correction, log_probs(logits), log_probs(task.behaviour), advantages)
    gradients, exact = estimates(logits, weights), exact_gradient(task, logits)
    mean = np.tensordot(chance, gradients, axes=1)
    variance = float((chance[:, None, None] * (gradients - mean) ** 2).sum())
    norm, length = float(np.linalg.norm(exact)), float(np.linalg.norm(mean))
    cosine = float((mean * exact).sum()) / (norm * length) if length else 0.0
    return Bias(float(np.linalg.norm(mean - exact)) / norm, cosine, variance**0.5 / norm)


def average(data: Stale, correction: Corrected, up_to_date: bool = False) -> Bias:
    """Return the mean of ``measure`` over the tasks. up_to_date: the baseline is that of
    ``current``, as an up-to-date critic would have it."""
    measured = [
        measure(task, logits, correction, logits if up_to_date else None) for task, logits in data
    ]
    return Bias(*np.mean([msgspec.structs.astuple(one) for one in measured], axis=0).tolist())


def value_targets(
    task: TokenTask, logits: Array, critic: Array, kind: str, bounds: dict[str, float]
) -> Array:
    """Return the value targets of learner/update/targets.py with gamma = lambda = 1, [sequences,
    tokens], for the values ``critic`` [sequences, tokens].

    kind: "gae", "vtrace" (``bounds`` rho_max and c_max, none by default) or "retrace".
    """
    ratios = log_probs(logits) - log_probs(task.behaviour)
    targets = []
    for outcome, value, ratio in zip(task.returns, critic, ratios, strict=True):
        rewards = np.append(np.zeros(TOKENS - 1), outcome)
        if kind == "gae":
            targets.append(gae(rewards, value, 1.0, 1.0)[1])
        elif kind == "retrace":
            targets.append(retrace(rewards, value, ratio, 1.0, 1.0)[1])
        else:
            cut = {"rho_max": UNTRUNCATED, "c_max": UNTRUNCATED} | bounds
            targets.append(vtrace(rewards, value, ratio, 1.0, 1.0, **cut)[1])
    return np.array(targets)


def target_bias(data: Stale, exact_critic: bool, kind: str, bounds: dict[str, float]) -> float:
    """Return the root mean square of E[value target | prefix] - V of current, over the tasks and
    the prefixes of ``behaviour``.

    exact_critic: the critic is V of current; otherwise V of ``behaviour``.
    """
    squares = []
    for task, logits in data:
        truth = values(task, logits)
        critic = truth if exact_critic else values(task, task.behaviour)
        targets = value_targets(task, logits, critic, kind, bounds)
        gaps = given_prefix(task.behaviour, targets) - truth
        squares.append(float(chances(task.behaviour) @ (gaps**2).mean(axis=1)))
    return float(np.mean(squares)) ** 0.5


def rows(seed: int = 0) -> list[ClaimRow]:
    """Return the rows on bias and noise of every correction, and on bias of the value targets."""
    rng = np.random.default_rng(seed)
    tasks = [random_task(rng) for _ in range(TASKS)]
    data = {staleness: stale(tasks, staleness) for staleness in STALENESS}
    return [
        *_by_staleness(data), *_levels_and_bounds(data[SHOWN]), *_baselines(data[SHOWN]),
        *_targets(data[SHOWN]),
    ]  # fmt: skip


def _by_staleness(data: dict[int, Stale]) -> list[ClaimRow]:
    results = []
    steps = "/".join(str(staleness) for staleness in STALENESS)
    for name in CORRECTIONS:
        correction = load(name, {})
        measured = [average(pairs, correction) for pairs in data.values()]
        bias, cosine = [one.bias for one in measured], [one.cosine for one in measured]
        claim = f"Staleness: of {name} ({correction.level}), {steps} steps:"
        results += [
            ClaimRow(f"{claim} bias", show(bias, 3), "0 at 0 only", bias[0] < EXACT < bias[-1]),
            ClaimRow(f"{claim} cosine", show(cosine, 3), "1 at 0", abs(cosine[0] - 1) < EXACT),
        ]
    bias = [average(pairs, UNBIASED).bias for pairs in data.values()]
    claim = "Staleness: largest bias of tis (sequence, no bound) at any staleness"
    return [*results, ClaimRow(claim, magnitude(max(bias)), "0", max(bias) < EXACT)]


def _levels_and_bounds(pairs: Stale) -> list[ClaimRow]:
    settings = {
        "no bound, level token / turn / sequence": [(level, UNTRUNCATED) for level in LEVELS],
        "sequence, bound 1 / 2 / none": [("sequence", upper) for upper in BOUNDS],
    }
    results = []
    for name, ladder in settings.items():
        made = [average(pairs, load("tis", {"level": l_, "upper": u})) for l_, u in ladder]
        bias, deviation = [m.bias for m in made], [m.deviation for m in made]
        falls, rises = bool(np.all(np.diff(bias) < 0)), bool(np.all(np.diff(deviation) > 0))
        claim = f"Staleness {SHOWN}: bias of tis, {name}"
        results.append(ClaimRow(claim, show(bias, 3), "falls to 0", falls))
        claim = f"Staleness {SHOWN}: deviation of tis, {name}"
        results.append(ClaimRow(claim, show(deviation, 3), "rises", rises))
    return results


def _baselines(pairs: Stale) -> list[ClaimRow]:
    none, token = load("none", {}), load("tis", {"upper": UNTRUNCATED})
    before = [average(pairs, one).bias for one in (none, token)]
    after = [average(pairs, one, up_to_date=True).bias for one in (none, token)]
    moves = after[0] > before[0] and abs(after[1] - before[1]) < EXACT
    claim = f"Staleness {SHOWN}: bias of none / tis (token, no bound), baseline of current"
    return [ClaimRow(claim, show(after, 3), f"more than before / {before[1]:.3f}", moves)]


TARGETS: dict[str, tuple[str, dict[str, float], tuple[bool, bool]]] = {
    "gae": ("gae", {}, (False, False)),
    "vtrace without bounds": ("vtrace", {}, (True, True)),
    "vtrace, c_max 1": ("vtrace", {"c_max": 1.0}, (False, True)),
    "vtrace, rho_max 1 and c_max 1": ("vtrace", {"rho_max": 1.0, "c_max": 1.0}, (False, False)),
    "retrace": ("retrace", {}, (False, False)),
}
"""The kind and the bounds of value targets, and whether a stale and an exact critic leave them
without bias."""


def _targets(pairs: Stale) -> list[ClaimRow]:
    results = []
    for name, (kind, bounds, zeros) in TARGETS.items():
        biases = [target_bias(pairs, exact, kind, bounds) for exact in (False, True)]
        agrees = all((bias < EXACT) == zero for bias, zero in zip(biases, zeros, strict=True))
        expected = " / ".join("0" if zero else "> 0" for zero in zeros)
        claim = f"Staleness {SHOWN}: bias of value targets, stale / exact critic: {name}"
        measured = show(np.where(np.array(biases) < EXACT, 0.0, biases))
        results.append(ClaimRow(claim, measured, expected, agrees))
    return results


def _each_token(sequence: Array) -> Array:
    return np.repeat(sequence[:, None], TOKENS, axis=1)


@cache
def _segments(tokens: int) -> Segments:
    count = SEQUENCES * TOKENS // tokens
    return Segments(
        torch.arange(count).repeat_interleave(tokens),
        torch.zeros(count, dtype=torch.float64),
        torch.full((count,), float(tokens), dtype=torch.float64),
    )
