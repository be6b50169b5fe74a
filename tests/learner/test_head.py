"""The blockwise head equals a full log-softmax: values, entropies and gradients."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from coppice.common.support import Support, decode, encode
from coppice.learner.forest import head
from coppice.learner.forest.head import token_logprobs

BOUND = 1e-5


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "ROWS", 32)
    monkeypatch.setattr(head, "CPU_SCORES", 32 * 128)


def given(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """hidden [rows, 24], weight [vocabulary, 24], targets and upstream [rows]."""
    torch.manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, 24).to(dtype)
    weight = (0.4 * torch.randn(vocabulary, 24)).to(dtype)
    return [hidden, weight, torch.randint(0, vocabulary, (rows,)), torch.randn(rows)]


def full(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
    support: Support | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Log-probabilities and entropies from all logits in double, over a mask of the support."""
    scores = hidden.double() @ weight.double().T / temperature
    if support is not None:
        left = torch.as_tensor(support.counts == 0)[:, None].repeat(1, len(weight))
        left[torch.as_tensor(support.places), torch.as_tensor(support.ids)] = True
        scores = scores.masked_fill(~left, -torch.inf)
    logs = scores.log_softmax(-1)
    return [logs.gather(1, targets[:, None])[:, 0], torch.special.entr(logs.exp()).sum(-1)]


def random_support(targets: torch.Tensor, vocabulary: int, seed: int = 0) -> Support:
    """Between one and all tokens for each target, and the whole vocabulary for every fourth."""
    rng, left = np.random.default_rng(seed), []
    for row, target in enumerate(targets.tolist()):
        others = rng.choice(vocabulary, int(rng.integers(0, vocabulary)), replace=False)
        left.append([] if row % 4 == 3 else sorted({target, *(others if row % 4 else others[:3])}))
    support = decode(encode(left), len(left))
    assert support is not None
    return support


def compare(
    inputs: list[torch.Tensor], temperature: float, trained: bool, bound: float = BOUND,
    support: Support | None = None,
) -> None:  # fmt: skip
    hidden, weight, targets, upstream = inputs
    sides = []
    for compute in (token_logprobs, full):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)]
        logprobs, entropy = compute(leaves[0], leaves[1], targets, temperature, support)
        slopes = torch.autograd.grad((logprobs * upstream).sum(), leaves[: 1 + trained])
        sides.append([logprobs.detach(), entropy.detach(), *slopes])
    for got, expected in zip(*sides, strict=True):
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        assert_close(got.double(), expected.double(), atol=bound * scale, rtol=0)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(32, 256), (0, 300), (1, 50), (75, 300), (33, 129), (64, 1000)]
)
def test_values_and_gradients_equal_the_full_version(
    rows: int, vocabulary: int, temperature: float, trained: bool
) -> None:
    compare(given(rows, vocabulary), temperature, trained)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("rows", "vocabulary"), [(32, 256), (1, 50), (75, 300), (64, 1000)])
def test_over_a_support_values_and_gradients_are_those_of_the_masked_softmax(
    monkeypatch: pytest.MonkeyPatch, rows: int, vocabulary: int, share: float, trained: bool
) -> None:
    monkeypatch.setattr(head, "KEPT_SHARE", share)
    inputs = given(rows, vocabulary)
    compare(inputs, 0.8, trained, support=random_support(inputs[2], vocabulary))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("budget", [0, 40_000, 1 << 30])
def test_what_is_kept_for_backward_does_not_change_the_gradients(
    monkeypatch: pytest.MonkeyPatch, share: float, budget: int
) -> None:
    monkeypatch.setattr(head, "KEPT_SHARE", share)
    monkeypatch.setattr(head, "KEPT_BYTES", budget)
    compare(given(75, 700), 0.9, True)


@pytest.mark.parametrize("trained", [False, True])
def test_narrow_inputs_are_reduced_in_float32(trained: bool) -> None:
    inputs = given(75, 300, torch.bfloat16)
    own, plain = (compute(*inputs[:3], temperature=0.8) for compute in (token_logprobs, full))
    for made, expected in zip(own, plain, strict=True):
        assert made.dtype == torch.float32
        assert_close(made.double(), expected, atol=BOUND, rtol=0)
    compare(inputs, 0.8, trained, bound=2**-7)  # the gradients are handed back in bfloat16


@pytest.mark.parametrize("trained", [False, True])
def test_the_path_of_narrow_products_agrees(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    """What accelerators do with bfloat16, here on the CPU."""
    monkeypatch.setattr(head, "WIDE_ON", ())
    hidden, weight, targets, _ = given(75, 300, torch.bfloat16)
    expected = full(hidden, weight, targets, 0.8)[0]  # the logits are not rounded
    assert_close(
        token_logprobs(hidden, weight, targets, 0.8)[0].double(), expected, atol=BOUND, rtol=0
    )
    compare(given(75, 300), 0.8, trained)
    compare(given(75, 300, torch.bfloat16), 0.8, trained, bound=0.03)


def test_scores_far_apart_between_blocks_stay_exact() -> None:
    hidden, weight, *rest = given(40, 700)
    for first, last in ((0.1, 60), (60, 0.1)):
        compare([hidden, weight * torch.linspace(first, last, 700)[:, None], *rest], 1.0, True)


@pytest.mark.parametrize("first", [0, 690])
def test_a_support_within_one_block_leaves_nothing_of_the_others(first: int) -> None:
    hidden, weight, _, upstream = given(40, 700)
    weight = weight * torch.linspace(0.1, 60, 700)[:, None]
    support = Support(np.full(40, 5), np.tile(np.arange(first, first + 5), 40))
    compare([hidden, weight, torch.full((40,), first + 2), upstream], 1.0, True, support=support)


def test_a_float32_weight_under_narrow_hidden_states_keeps_its_gradient_wide() -> None:
    hidden, _, targets, upstream = given(40, 200, torch.bfloat16)
    weight = given(40, 200)[1].to(torch.bfloat16).float().requires_grad_()
    slopes = [
        torch.autograd.grad((compute(hidden, weight, targets, 1.0)[0] * upstream).sum(), weight)
        for compute in (token_logprobs, full)
    ]
    assert_close(*slopes, atol=1e-4, rtol=0)
