"""Tree attention: its backends agree with the dense mask, and whole models with path-by-path
training."""

import os
import shutil
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest import attention, flex
from coppice.learner.forest.attention import Layout, tree_attention
from coppice.learner.forest.trees import Forest, Path, filled, pack
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from tests import tiny
from tests.learner.forests import forest, random_paths


def packed(paths: list[list[int]]) -> Forest:
    return pack([Path(p, 1) for p in paths])


def ancestors(made: Forest) -> np.ndarray:
    index = np.arange(len(made.end))
    return (index[None, :] <= index[:, None]) & (index[:, None] < made.end[None, :])


LAYER: Any = None
"""The module that transformers passes; nothing of it is read when a layout is given."""


def attend(
    made: Forest, backend: Any, window: int | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output and the three gradients of four query heads on two key heads."""
    torch.manual_seed(0)
    n = len(made.end)
    query, key, value = (
        torch.randn(1, h, n, 8, dtype=dtype, requires_grad=True) for h in (4, 2, 2)
    )
    layout = Layout(made, backend, "cpu")
    out, _ = tree_attention(LAYER, query, key, value, None, sliding_window=window, layout=layout)
    total = (out * torch.randn_like(out)).sum()
    return [out.detach(), *torch.autograd.grad(total, (query, key, value))]


@pytest.mark.slow
# a small block begins in one tree and ends in the next
@example(paths=[[0, 0, 0, 0], [0, 1], [1, 0]], small=3, window=None)
@given(paths=random_paths, small=st.integers(0, 12), window=st.sampled_from([None, 3, 100]))
@settings(deadline=None, max_examples=200)
def test_the_cascade_equals_the_dense_mask_in_values_and_gradients(
    paths: list[list[int]], small: int, window: int | None
) -> None:
    made = packed(paths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SMALL_SUBTREE", small)
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            both = (attend(made, backend, window, dtype) for backend in ("cascade", "dense"))
            for a, b in zip(*both, strict=True):
                torch.testing.assert_close(a, b, atol=bound, rtol=bound)


@given(paths=random_paths, window=st.sampled_from([None, 2, 5]))
@settings(deadline=None, max_examples=30)
def test_flex_sees_ancestors_and_fillers_alone(paths: list[list[int]], window: int | None) -> None:
    made = packed(paths)
    grown = filled(made, 16)
    size = len(grown.end)
    ancestor = flex.ancestor_rule(grown, window, "cpu")
    rule = create_mask(ancestor, None, None, size, size, device="cpu")[0, 0].numpy()
    expected = ancestors(grown)
    if window is not None:
        expected &= grown.depth[:, None] - grown.depth[None, :] < window
    assert (rule == expected).all()
    n = len(made.end)
    assert not rule[n:, :n].any()
    assert not rule[:n, n:].any()


def branching(seed: int) -> Forest:
    """Paths of hundreds of tokens that branch from trunks and from one another, in whole blocks."""
    rng, paths = np.random.default_rng(seed), list[Path]()
    trunks = [rng.integers(0, 50, rng.integers(1, 400)) for _ in range(4)]
    for _ in range(rng.integers(1, 25)):
        trunk = trunks[rng.integers(4)] if not paths or rng.random() < 0.5 else paths[-1].tokens
        kept, added = rng.integers(1, len(trunk) + 1), rng.integers(0, 50, rng.integers(1, 500))
        paths.append(Path(np.concatenate([np.asarray(trunk)[:kept], added]), 1))
    return filled(pack(paths, share=seed % 3 > 0), flex.BLOCK)


def listed(mask: Any, name: str) -> list[set[int]]:
    numbers, indices = (getattr(mask, f"{name}_{part}")[0, 0] for part in ("num_blocks", "indices"))
    return [set(row[:n].tolist()) for n, row in zip(numbers, indices, strict=True)]


@pytest.mark.second
@pytest.mark.parametrize("seed", range(6))
def test_the_block_mask_equals_that_of_all_pairs(seed: int) -> None:
    made = branching(seed)
    size = len(made.end)
    for window in (None, 1, 64, 300, 1000):
        ours, rule = flex.block_mask(made, window, "cpu"), flex.ancestor_rule(made, window, "cpu")
        reference = create_block_mask(rule, None, None, size, size, device="cpu")
        for name in ("kv", "full_kv", "q", "full_q"):  # the last two serve the backward
            assert listed(ours, name) == listed(reference, name), (window, name)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++") or "ATEN_CPU_CAPABILITY" in os.environ,
    reason="torch.compile needs a compiler, and does not know plain kernels",
)
def test_flexattention_equals_the_dense_mask_and_is_compiled_once_for_all_lengths() -> None:
    counters.clear()
    for seed in range(1, 6):
        made = branching(seed)
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, h, len(made.end), 64) for h in (4, 2, 2))
        with torch.no_grad():
            mask = flex.block_mask(made, None, "cpu")
            ours: Any = flex.compiled()(query, key, value, block_mask=mask, enable_gqa=True)
            layout = Layout(made, "dense", "cpu")
            dense, _ = tree_attention(LAYER, query, key, value, None, layout=layout)
        torch.testing.assert_close(ours.transpose(1, 2), dense, atol=2e-5, rtol=2e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_heads_that_are_too_narrow_for_flexattention_take_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = branching(1)
    query, key, value = (torch.randn(1, h, len(made.end), 8) for h in (4, 2, 2))
    layout = Layout(made, "dense", "cpu")
    dense, _ = tree_attention(LAYER, query, key, value, None, layout=layout)
    monkeypatch.setattr(layout, "backend", "flex")
    ours, _ = tree_attention(LAYER, query, key, value, None, layout=layout)
    assert torch.equal(ours, dense)


@pytest.mark.parametrize(("backend", "device"), [("flex", "cpu"), ("cascade", "meta")])
def test_a_backend_is_refused_where_it_cannot_train(backend: Any, device: str) -> None:
    with pytest.raises(ValueError, match=r"learner\.attention"):
        Layout(pack(forest(1)), backend, device)


def test_a_model_that_does_not_pass_the_layout_on_is_refused() -> None:
    some = torch.randn(1, 2, 3, 8)
    with pytest.raises(RuntimeError, match="cannot train on trees"):
        tree_attention(torch.nn.Module(), some, some, some, attention.FOREST)


class _Norm(torch.nn.Module):
    """RMSNorm in the precision of its input: transformers' casts to float32."""

    def __init__(self, old: Any):
        super().__init__()
        self.weight, self.eps = old.weight, getattr(old, "variance_epsilon", None) or old.eps
        self.shift = 1.0 if "Gemma" in type(old).__name__ else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.shift) * x * root


def full_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *_: Any
) -> tuple[Any, Any]:
    """Log-probabilities without the chunked float32 head, which has its own tests."""
    made = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return made, made.clone()


def exact(model: TreeModel) -> None:
    model.tower.double()
    model.compute = torch.float64
    for module in list(model.tower.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, _Norm(child))


def compare(
    model: TreeModel, paths: list[Path], logprob_bound: float = 2e-5, gradient_bound: float = 1e-4
) -> None:
    """The forest against every path read alone: outputs and, relative to their norms, gradients."""
    torch.manual_seed(1)
    for parameter in model.trained().values():
        if not parameter.any():  # fresh adapters and value heads are zero
            parameter.data.normal_(0, 0.1)
    forest = pack(paths)
    assert forest.nodes < forest.path_tokens
    together = model.read(forest)[0]
    scale = torch.linspace(-1, 2, len(together), dtype=together.dtype)
    (together * scale).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.trained().items() if p.grad is not None}
    model.tower.zero_grad()
    pieces = [model.read(pack([path]), attention="causal")[0] for path in paths]
    (torch.cat(pieces) * scale).sum().backward()
    assert (together - torch.cat(pieces)).abs().max() < logprob_bound
    assert gradients
    for name, parameter in model.trained().items():
        if parameter.grad is not None:
            bound = gradient_bound * (parameter.grad.norm() + 1e-8)
            assert (gradients[name] - parameter.grad).norm() < bound, name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dense", "cascade"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_packed_training_equals_path_by_path_training_to_float64_rounding(
    tmp_path: FilePath, kind: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SMALL_SUBTREE", 6)
    config = LearnerConfig(dtype="float32", lora=LoraConfig(0), attention=backend)
    monkeypatch.setattr("coppice.learner.model.model.token_logprobs", full_head)
    model = TreeModel(str(tiny.save(tmp_path, kind)), config, 1.0, Ranks(60))
    exact(model)
    for seed in (3, 4):
        compare(model, forest(seed, steps=3), 1e-12, 1e-11)
        model.tower.zero_grad()
