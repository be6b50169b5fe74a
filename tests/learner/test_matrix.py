"""Every scheme with every correction at every level raises the exact objective on stale data: two
tokens of {0, 1}, sampled one after the other, of which only the pair 1, 1 succeeds."""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coppice.common.options import modules
from coppice.learner import schemes
from coppice.learner.update import corrections
from coppice.learner.update.corrections import Level, Logprobs, Segments
from coppice.learner.update.objective import token_weights
from tests.learner.tables import acted, made_of

OPTIONS: dict[str, dict[str, Any]] = {
    "arpo": {"sharing": "hard"}, "gae": {"targets": "retrace", "kl_coef": 0.01, "lam": 0.9},
    "grpo": {"column": "outcome"}, "ppr": {"targets": "vtrace", "kl_coef": 0.01},
    "reinforce_pp": {"column": "outcome"},
}  # fmt: skip
QUESTIONS, EACH = 4, 16
START, STALE = np.zeros((2, 2)), np.array([[0.0, 0.18], [0.0, 0.16]])


def policy(logits: np.ndarray) -> np.ndarray:
    """The probabilities [place, token] of the first and the second token."""
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


@functools.cache
def prepared(name: str) -> tuple[torch.Tensor, ...]:
    """A batch of the older policy: tokens, log-probabilities by the policy of now and by the older
    one, what the scheme makes of them, and weights, all [tokens]."""
    n, now, old = QUESTIONS * EACH, policy(START), policy(STALE)
    tokens = (np.random.default_rng(7).random((n, 2)) < old[:, 1]).astype(np.int64)
    won = tokens.all(1).astype(np.float64)
    near, far = (np.log(p[[0, 1], tokens]) for p in (now, old))
    value = np.stack([np.full(n, now[:, 1].prod()), tokens[:, 0] * now[1, 1]], 1)
    columns = {
        "value": value, "kl": far - near, "log_ratio": near - far,
        # what a perfect reward model pays: how much each token raises the value of what is ahead
        "prm": np.stack([value[:, 1], won], 1) - value,
    }  # fmt: skip
    scheme = schemes.load(name, OPTIONS.get(name, {}))
    scores: dict[str, Any] = {key: won.tolist() for key in ("reward", "outcome")}
    scores |= {"mc_value": value[:, 0].tolist(), "process": [np.nan] * n}
    table = made_of(
        [1] * n, scores, np.repeat(np.arange(QUESTIONS), EACH).tolist(), [2] * n, [True] * 2 * n,
        {key: columns[key].ravel().tolist() for key in scheme.needs.models}, [0] * n,
    )  # fmt: skip
    paths = [acted([int(q)], tokens[i], far[i]) for i, q in enumerate(table.tree)]
    table = msgspec.structs.replace(table, paths=paths)
    weights, made = token_weights(table, table.mask(), "turn"), scheme(table).advantages
    floats = (torch.as_tensor(a.ravel()).float() for a in (near, far, made, weights))
    return torch.as_tensor(tokens.ravel()), *floats


@pytest.mark.parametrize("correction", corrections.CORRECTIONS)
@pytest.mark.parametrize("level", corrections.LEVELS)
@pytest.mark.parametrize("name", modules(schemes.__name__))
def test_four_stale_steps_raise_the_objective(name: str, level: Level, correction: str) -> None:
    tokens, near, far, advantage, weights = prepared(name)
    correct = corrections.load(correction, {"level": level})
    ids = torch.arange(len(tokens)) // (1 if level == "token" else 2)
    count = torch.bincount(ids).float()
    segments = {level: Segments(ids, torch.zeros_like(count), count)}
    logits = torch.tensor(START, dtype=torch.float32)
    for _ in range(4):
        logits = logits.detach().requires_grad_()
        current = logits.log_softmax(1).repeat(len(tokens) // 2, 1).gather(1, tokens[:, None])[:, 0]
        term = correct(Logprobs(current, near, far, segments), advantage).term
        (slope,) = torch.autograd.grad((weights * term).sum(), logits)
        logits = logits + 0.1 * slope / (slope.norm() + 1e-8)
    before, after = (policy(some)[:, 1].prod() for some in (START, logits.detach().numpy()))
    assert after > before + 0.03
