"""Every scheme with every correction at every level trains a tabular policy on stale data: the
exact objective rises.

The world: progress p in {0, 1, 2}; a turn is two tokens of {0, 1}, sampled one after the other; the
right pair of p moves on to min(p + 1, 2), any other stays. The reward of a turn is whether its pair
was right, the outcome whether an episode of three turns ends at p = 2. By dynamic programming the
objective and all values are known exactly.
"""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coppice.learner import schemes
from coppice.learner.update import corrections
from coppice.learner.update.corrections import Level, Logprobs, Segments
from coppice.learner.update.objective import token_weights
from tests.learner.tables import acted, made_of

TURNS, PROGRESS, EACH = 3, 3, 16
RIGHT = np.array([[0, 1], [1, 1], [1, 0]])  # the right pair at each progress
STARTS = np.array([0, 1, 0, 1])  # one question each

Goal = tuple[int, int]
"""A scheme maximises the first times the right turns, plus the second times the probability of
success."""
STEPS, END = (1, 0), (0, 1)
SCHEMES: dict[str, tuple[Goal, dict[str, Any]]] = {
    "arpo": (END, {"sharing": "hard"}),
    "gae": (END, {"targets": "retrace", "kl_coef": 0.01, "lam": 0.9}),
    "grpo": (END, {"column": "outcome"}),
    "ppr": ((1, 1), {"targets": "vtrace", "kl_coef": 0.01}),
    "reinforce_pp": (END, {"column": "outcome"}),
    **{name: (STEPS, {}) for name in "gigpo rloo slate slate_full turn_grpo vpr_v2".split()},
    **{name: (END, {}) for name in "mc_pr oprl outcome prime sao spo".split()},
    **{name: (END, {}) for name in "tree_grpo treepo treerl vineppo".split()},
}
"""The goal and the options of each."""


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Token probabilities [places, 2]. Places 0..2: first token at each progress; 3 + 2 p + a:
    second token after a."""
    e = np.exp(logits)
    return e / e.sum(1, keepdims=True)


def place_values(policy: np.ndarray, goal: Goal) -> tuple[np.ndarray, np.ndarray]:
    """Exact values before tokens [TURNS, places], turns and the end [TURNS + 1, PROGRESS]."""
    after = np.zeros((TURNS + 1, PROGRESS))
    after[TURNS, 2] = goal[1]
    before = np.zeros((TURNS, len(policy)))
    for t in range(TURNS - 1, -1, -1):
        for p in range(PROGRESS):
            for a in (0, 1):
                ends = np.full(2, after[t + 1, p])
                if a == RIGHT[p][0]:
                    ends[RIGHT[p][1]] = goal[0] + after[t + 1, min(p + 1, 2)]
                before[t, 3 + 2 * p + a] = policy[3 + 2 * p + a] @ ends
            before[t, p] = after[t, p] = policy[p] @ before[t, [3 + 2 * p, 4 + 2 * p]]
    return before, after


class Prepared(msgspec.Struct, frozen=True):
    """A stale batch: places, tokens, log-probabilities, advantages and weights [tokens]."""

    goal: Goal
    start: np.ndarray
    places: torch.Tensor
    tokens: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    weights: torch.Tensor
    of: dict[Level, torch.Tensor]

    def climbed(self, correction: str, level: Level, steps: int = 4) -> float:
        """The exact objective after steps of one length up the corrected surrogate."""
        correct, ids = corrections.load(correction, {"level": level}), self.of[level]
        count = torch.bincount(ids).float()
        segments = {level: Segments(ids, torch.zeros_like(count), count)}  # all tokens are here
        logits = torch.tensor(self.start, dtype=torch.float32)
        for _ in range(steps):
            logits = logits.detach().requires_grad_()
            current = logits.log_softmax(1)[self.places, self.tokens]
            compared = Logprobs(current, self.proximal, self.behaviour, segments)
            term = (self.weights * correct(compared, self.advantage).term).sum()
            (slope,) = torch.autograd.grad(term, logits)
            logits = logits + 0.1 * slope / (slope.norm() + 1e-8)
        return self.objective(logits.detach().double().numpy())

    def objective(self, logits: np.ndarray) -> float:
        return float(place_values(probabilities(logits), self.goal)[1][0, STARTS].mean())


@functools.cache
def prepared(name: str) -> Prepared:
    """Whole episodes of an older policy, and what a scheme makes of them."""
    (goal, options), rng = SCHEMES[name], np.random.default_rng(7)
    start = rng.normal(0, 0.2, (PROGRESS * 3, 2))
    policy, old = probabilities(start), probabilities(start + rng.normal(0, 0.1, start.shape))
    tree = np.repeat(np.arange(len(STARTS)), EACH)
    n, p = len(tree), STARTS[tree]
    places, tokens, at = np.zeros((3, n, TURNS, 2), np.int64)
    for t in range(TURNS):
        at[:, t, 0] = p
        for i, place in enumerate((p, 3 + 2 * p)):
            places[:, t, i] = place + (tokens[:, t, 0] if i else 0)
            tokens[:, t, i] = rng.random(n) < old[places[:, t, i], 1]
        p = np.minimum(p + (tokens[:, t] == RIGHT[p]).all(1), 2)
    time, seen, pick = np.tile(np.arange(TURNS), n), at[:, :, 0].ravel(), (places, tokens)
    values, ends = place_values(policy, goal)
    right = (tokens == RIGHT[at[:, :, 0]]).all(2).astype(np.float64)
    outcome, process = np.full((2, n, TURNS), np.nan)
    outcome[:, -1], process[:, :-1] = p == 2, right[:, :-1]  # the last turn is not judged
    scores = {"reward": right, "outcome": outcome, "process": process}
    table = made_of(
        [TURNS] * n, {key: column.ravel().tolist() for key, column in scores.items()},
        tree.tolist(), [2] * (n * TURNS), anchor=seen.tolist(),
    )  # fmt: skip
    table.scores["mc_value"] = ends[time, seen]
    value = values[np.repeat(time, 2), places.ravel()]
    # what a perfect reward model pays: by how much each token raises the value of what is ahead
    ahead = np.append(value.reshape(n, -1)[:, 1:], (p == 2)[:, None], 1)
    columns = {
        "value": value, "kl": np.log(old[pick] / policy[pick]).ravel(),
        "log_ratio": np.log(policy[pick] / old[pick]).ravel(), "prm": ahead.ravel() - value,
    }  # fmt: skip
    scheme = schemes.load(name, options)
    # "slate" and "vpr_v2" compare candidates from one prefix: here from one progress at one turn
    group = (table.tree * TURNS + time) * PROGRESS + seen
    table = msgspec.structs.replace(
        table, group=group if name in ("slate", "vpr_v2") else table.group,
        sampled=np.ones(n * TURNS * 2, bool),
        token_scores={key: columns[key] for key in scheme.needs.models},
        paths=[
            acted(np.append(STARTS[tree[i]], tokens[i, :t]), tokens[i, t],
                  np.log(old[places[i, t], tokens[i, t]]))
            for i in range(n) for t in range(TURNS)
        ],
    )  # fmt: skip
    turn = torch.as_tensor(table.row())
    of: dict[Level, torch.Tensor] = {
        "token": torch.arange(len(turn)), "turn": turn, "sequence": turn // TURNS,
    }  # fmt: skip
    weights = token_weights(table, table.mask(), "turn")
    near, far, gain, share = (
        torch.as_tensor(a.ravel()).float()
        for a in (np.log(policy[pick]), np.log(old[pick]), scheme(table).advantages, weights)
    )
    flat = (torch.as_tensor(a.ravel()) for a in pick)
    return Prepared(goal, start, *flat, near, far, gain, share, of)


def test_the_matrix_has_every_scheme() -> None:
    assert sorted(SCHEMES) == schemes.names()


@pytest.mark.parametrize("correction", corrections.CORRECTIONS)
@pytest.mark.parametrize("name", SCHEMES)
def test_four_stale_steps_raise_the_objective_at_every_level(name: str, correction: str) -> None:
    batch = prepared(name)
    for level in corrections.LEVELS:
        assert batch.climbed(correction, level) > batch.objective(batch.start) + 0.03, level
