"""The claims of four papers, quoted or worked out by hand, and exact gradients of stale data."""

import numpy as np
import pytest
import torch

from coppice.learner.update.corrections import CORRECTIONS, LEVELS, Logprobs, load
from coppice.research.theories import ClaimRow, differences, main, oprl, ppr, slate, staleness, vpr
from coppice.research.theories.staleness import (
    EXACT,
    Stale,
    TokenTask,
    average,
    chances,
    log_probs,
    stale,
)
from tests.tools.said import Patch

PAPERS = {"slate": slate, "ppr": ppr, "vpr": vpr, "oprl": oprl}
QUOTED = {
    # 1 / T; 1 / 3.25, 1 / 13.5, 1 / 71; the inequality of proposition 2; 7.2 x .8994 and 4.4
    "slate": [
        "0.5000 / 0.2500 / 0.1250", "0.3077 / 0.0741 / 0.0141", "0.8421 / 0.8889 / 0.9184",
        "6.4759 / 4.4000",
    ],
    "ppr": ["1.2143", "0.3676", "0.0488", "3.0 / 5.0", "-0.4 / -0.8"],
    "vpr": ["0.900000 / 0.348678", "9.000000 / 0.000266"],
    "oprl": [],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_agrees_with_other_draws_too_and_expects_what_is_quoted(paper: str) -> None:
    rows = PAPERS[paper].rows(seed=1)
    assert [row.claim for row in rows if not row.agrees] == []
    assert set(QUOTED[paper]) <= {row.expected for row in rows}


def test_the_command_returns_1_when_a_row_disagrees(monkeypatch: Patch) -> None:
    assert main(["vpr"]) == 0
    monkeypatch.setattr(vpr, "rows", lambda seed: [ClaimRow("a claim", "1", "2", False)])
    assert main(["vpr"]) == 1
    assert main(["nobody"]) == 2


EVERY = [(name, level) for name in CORRECTIONS for level in LEVELS]


@pytest.fixture
def tasks() -> list[TokenTask]:
    rng = np.random.default_rng(3)
    return [staleness.random_task(rng) for _ in range(3)]


@pytest.fixture
def old(tasks: list[TokenTask]) -> Stale:
    return stale(tasks, 8)


def test_the_exact_gradient_is_that_of_the_mean_return(old: Stale) -> None:
    for task, logits in old:
        numeric = differences(lambda at, task=task: float(chances(at) @ task.returns), logits)
        assert staleness.exact_gradient(task, logits) == pytest.approx(numeric, abs=1e-9)


def test_the_estimators_mean_is_the_gradient_of_the_expected_surrogate(old: Stale) -> None:
    task, logits = old[0]
    correction, (states, actions) = load("icepop", {}), staleness.paths()
    leaf = torch.from_numpy(logits).requires_grad_()
    with torch.enable_grad():
        places = torch.from_numpy(states), torch.from_numpy(actions)
        current = torch.log_softmax(leaf, dim=-1)[places].flatten()
        behaviour = torch.from_numpy(log_probs(task.behaviour).ravel())
        chance = torch.from_numpy(chances(task.behaviour)).repeat_interleave(staleness.TOKENS)
        advantages = torch.from_numpy(task.returns).repeat_interleave(staleness.TOKENS)
        found = correction(Logprobs(current, current.detach(), behaviour), advantages)
        (gradient,) = torch.autograd.grad((chance * found.term).sum(), leaf)
    each = np.repeat(task.returns[:, None], staleness.TOKENS, axis=1)
    weights = staleness.token_weights(
        correction, log_probs(logits), log_probs(task.behaviour), each
    )
    mean = np.tensordot(chances(task.behaviour), staleness.estimates(logits, weights), axes=1)
    assert mean == pytest.approx(gradient.numpy(), abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), EVERY)
def test_fresh_corrections_are_unbiased(name: str, level: str, tasks: list[TokenTask]) -> None:
    fresh = stale(tasks, 0)
    found, plain = average(fresh, load(name, {"level": level})), average(fresh, load("none", {}))
    assert found.bias < EXACT
    assert found.deviation == pytest.approx(plain.deviation)


@pytest.mark.slow
def test_every_row_agrees(monkeypatch: Patch) -> None:
    monkeypatch.setattr(staleness, "TASKS", 5)
    assert [row.claim for row in staleness.rows() if not row.agrees] == []
