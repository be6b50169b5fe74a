"""The learner on CUDA: FlexAttention trains as the dense mask does, whole models as path by path,
and few shapes compile. Without CUDA the same lines run on the CPU with the cascade, so that a fault
of the tests themselves is found before a GPU is paid for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest.attention import Layout, tree_attention
from coppice.learner.forest.trees import pack
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from tests import tiny
from tests.learner.forests import forest
from tests.learner.test_attention import compare

CUDA = torch.cuda.is_available()
DEVICE, FAST = ("cuda", "flex") if CUDA else ("cpu", "cascade")
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def attend(backend: Any, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of a random forest, eight query heads on two key heads, without the
    filling."""
    made = pack(forest(1, trees=6, steps=4))
    layout = Layout(made, backend, DEVICE)
    torch.manual_seed(0)
    size, n = len(layout.forest.end), made.nodes
    given = [
        torch.randn(1, h, n, 64, dtype=dtype, device=DEVICE, requires_grad=True) for h in (8, 2, 2)
    ]
    query, key, value = (torch.nn.functional.pad(t, (0, 0, 0, size - n)) for t in given)
    out, _ = tree_attention(
        torch.nn.Module(), query, key, value, None, sliding_window=window, layout=layout
    )
    upstream = torch.randn(
        1, n, 8, 64, dtype=dtype, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)
    )
    (out[:, :n] * upstream).sum().backward()
    return [out[:, :n].detach(), *(t.grad for t in given if t.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
def test_flexattention_trains_as_the_dense_mask_does(
    window: int | None, dtype: torch.dtype
) -> None:
    ours, dense = attend(FAST, window, dtype), attend("dense", window, dtype)
    assert len(ours) == len(dense) == 4
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("backend", [FAST, "dense"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_whole_models_train_on_forests_as_path_by_path(
    tmp_path: Path, kind: str, backend: Any, rank: int
) -> None:
    # FlexAttention's narrowest head
    folder = tiny.save(tmp_path / kind, kind, hidden_size=64, head_dim=16)
    config = LearnerConfig(dtype="float32", lora=LoraConfig(rank, 8.0), attention=backend)
    model = TreeModel(str(folder), config, 1.0, Ranks(60))
    compare(model, forest(3, steps=3) if CUDA else forest(3, trees=1), 1e-3, 1e-2)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device (coppice dev gpu-check)")
def test_forests_of_all_sizes_compile_once() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    for seed in range(12):
        layout = Layout(pack(forest(seed, trees=2 + seed, steps=3)), "flex", "cuda")
        query = torch.randn(1, 4, len(layout.forest.end), 64, device="cuda", requires_grad=True)
        tree_attention(torch.nn.Module(), query, query, query, None, layout=layout)[
            0
        ].sum().backward()
    assert counters["stats"]["unique_graphs"] <= 2
