"""Packed training equals path-by-path training."""

import random
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import LearnerConfig, LoraConfig
from learner.head import token_logprobs
from learner.model import Policy
from learner.ranks import Ranks
from learner.trees import Path, micro_batches, pack, packed_sizes, share
from tests import tiny

LOGPROB_BOUND = 2e-5
GRADIENT_BOUND = 1e-4
"""Relative, float32."""


def forest(seed: int, trees: int = 2) -> list[Path]:
    """Paths of random trees under one common instruction: three candidates a step, two steps."""
    rng = random.Random(seed)

    def some(n: int) -> list[int]:
        return [rng.randrange(256) for _ in range(n)]

    paths, common = [], some(5)
    for _ in range(trees):
        prefix = common + some(rng.randrange(1, 6))
        for _ in range(2):
            actions = [some(rng.randrange(1, 7)) for _ in range(3)]
            paths += [Path(prefix + action, len(prefix)) for action in actions]
            prefix = prefix + actions[0] + some(4)
    return paths


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_a_forest_holds_each_distinct_prefix_once_and_ancestry_is_exact(paths: list[list[int]]) -> None:
    made = pack([Path(p, 1) for p in paths])
    distinct = {tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)}
    assert len(made.tokens) == len(distinct)
    position = 0
    for path in paths:
        reads = made.read[position : position + len(path) - 1]
        position += len(path) - 1
        for depth, (node, token) in enumerate(zip(reads, path, strict=False)):
            assert made.depth[node] == depth
            assert made.tokens[node] == token
            ancestors = [k for k in range(len(made.tokens)) if k <= node < made.end[k]]
            assert made.tokens[ancestors].tolist() == path[: depth + 1]
    assert made.target.tolist() == [t for p in paths for t in p[1:]]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_packed_logprobs_and_gradients_equal_path_by_path(tmp_path: FilePath, kind: str, rank: int) -> None:
    folder = tiny.save(tmp_path / kind, kind)
    settings_ = LearnerConfig(dtype="float32", kl_coef=0.0, lora=LoraConfig(rank=rank, alpha=8.0))
    policy = Policy(str(folder), settings_, 1.0, Ranks(60))
    if rank:  # fresh adapters are zero: give them something to differ by
        torch.manual_seed(1)
        for parameter in policy.trained().values():
            parameter.data.normal_(0, 0.1)
    paths = forest(3)
    packed, _, forwarded = policy.logprobs(paths)
    assert forwarded < sum(len(p.tokens) for p in paths)
    scale = torch.linspace(-1, 1, len(packed))
    (packed * scale).sum().backward()
    gradients = {n: p.grad.clone() for n, p in policy.trained().items() if p.grad is not None}
    policy.tower.zero_grad()
    alone = torch.cat([policy.logprobs([path])[0] for path in paths])
    plain = torch.cat([policy.plain_logprobs(path) for path in paths])
    (alone * scale).sum().backward()
    assert (packed - plain).abs().max() < LOGPROB_BOUND
    assert (packed - alone).abs().max() < LOGPROB_BOUND
    for name, parameter in policy.trained().items():
        if parameter.grad is not None:
            error = (gradients[name] - parameter.grad).norm() / (parameter.grad.norm() + 1e-8)
            assert error < GRADIENT_BOUND, name


@pytest.mark.parametrize("frozen", [True, False])
def test_the_chunked_head_equals_a_full_log_softmax_and_its_gradients(frozen: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(600, 16, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=not frozen)
    targets = torch.randint(0, 50, (600,))
    upstream = torch.randn(600)
    made, entropy = token_logprobs(hidden, weight, targets, 0.8)
    (made * upstream).sum().backward()
    got = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    full = (hidden @ weight.T / 0.8).log_softmax(-1)
    (full.gather(1, targets[:, None])[:, 0] * upstream).sum().backward()
    torch.testing.assert_close(made, full.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[0], hidden.grad, atol=1e-4, rtol=1e-4)
    if not frozen:
        torch.testing.assert_close(got[1], weight.grad, atol=1e-3, rtol=1e-4)


@given(st.integers(0, 100), st.integers(10, 80))
@settings(deadline=None, max_examples=30)
def test_micro_batches_keep_every_path_once_within_the_budget(seed: int, budget: int) -> None:
    paths = forest(seed)
    batches = micro_batches(paths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(paths)))
    for batch, size in zip(batches, packed_sizes(paths, batches), strict=True):
        assert size <= budget or len(batch) == 1


def test_shares_are_balanced_and_complete() -> None:
    shares = share([5, 9, 3, 3, 2], 2)
    assert sorted(i for s in shares for i in s) == [0, 1, 2, 3, 4]
    sizes = np.array([5, 9, 3, 3, 2])
    assert {int(sizes[s].sum()) for s in shares} == {11}
