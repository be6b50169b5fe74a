"""Forward and backward of a batch of paths: packed as one forest, against padded rows and against unshared packing (varlen).

The speed-up is compared with the token ratio (path tokens over packed tokens), the most that sharing can save. The targets of the head
are the same in all three cases. The model has ten layers of the default model's shape with random weights, all trained, on one thread.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from learner.config import LearnerConfig, LoraConfig
from learner.head import token_logprobs
from learner.model import TreeModel
from learner.ranks import Ranks
from learner.trees import Path, pack
from tools.research.benches.slate_shape import random_copy
from tools.research.benches.tree_shapes import SHAPES, Name

LAYERS, PADDED_ROWS, REPEATS = 10, 4, 1
GOALS = {"slate": 0.7, "mc_pr": 0.6}
"""The least share of the token ratio that the speed-up must reach. Other shapes need only be no slower than padded rows."""


def make(folder: FilePath, lora: int = 0) -> TreeModel:
    """Return a model of the default model's shape with fewer layers."""
    random_copy(folder, num_hidden_layers=LAYERS)
    return TreeModel(str(folder), LearnerConfig(dtype="float32"), LoraConfig(rank=lora), 1.0, Ranks(60))


def forest(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute as the learner does, which shares prefixes where sharing pays."""
    model.read(model.row(pack(paths, share=None)))[0].sum().backward()


def varlen(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute packed rows without sharing."""
    model.read(model.row(pack(paths, share=False)))[0].sum().backward()


def padded(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute rows padded to the longest of their batch, with the model's own attention."""
    causal = model.causal
    for first in range(0, len(paths), PADDED_ROWS):
        some = paths[first : first + PADDED_ROWS]
        longest = max(len(p.tokens) for p in some)
        ids = torch.tensor([[*p.tokens] + [0] * (longest - len(p.tokens)) for p in some])
        mask = torch.tensor([[1] * len(p.tokens) + [0] * (longest - len(p.tokens)) for p in some])
        hidden = causal.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        rows = torch.cat([hidden[i, p.start - 1 : len(p.tokens) - 1] for i, p in enumerate(some)])
        targets = torch.tensor([t for p in some for t in p.tokens[p.start :]])
        token_logprobs(rows, causal.get_output_embeddings().weight, targets)[0].sum().backward()


def seconds(work: Callable[[TreeModel, Sequence[Path]], None], model: TreeModel, paths: Sequence[Path]) -> float:
    """Return the CPU seconds of one forward and backward (not wall time, because the machine is shared)."""
    model.tower.zero_grad(set_to_none=True)
    start = time.process_time()
    work(model, paths)
    return time.process_time() - start


def measure(model: TreeModel, name: Name, repeats: int = REPEATS) -> dict[str, Any]:
    """Measure one shape in interleaved repeats and return the medians."""
    paths = SHAPES[name](np.random.default_rng(0))
    packed = pack(paths)
    times: dict[str, list[float]] = {"forest": [], "varlen": [], "padded": []}
    for _ in range(repeats):
        for key, work in (("forest", forest), ("varlen", varlen), ("padded", padded)):
            times[key].append(seconds(work, model, paths))
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {
        "shape": name,
        "tokens": packed.nodes,
        "token_ratio": packed.token_ratio,
        "over_padded": middle["padded"] / middle["forest"],
        "over_varlen": middle["varlen"] / middle["forest"],
        "cpu_s": middle,
    }


def run(shapes: tuple[Name, ...] = tuple(SHAPES), repeats: int = REPEATS) -> dict[str, Any]:
    """Measure all shapes. The ratio is the worst speed-up over its goal, so a ratio of 1 or more means that every goal is met."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = make(FilePath(folder))
            seconds(
                forest, model, SHAPES["grpo"](np.random.default_rng(1), prompt=50, action=20)
            )  # warms the allocator
            rows = [measure(model, name, repeats) for name in shapes]
    finally:
        torch.set_num_threads(threads)
    worst = min(r["over_padded"] / (GOALS[r["shape"]] * r["token_ratio"] if r["shape"] in GOALS else 1.0) for r in rows)
    name = "tree training: speed-up / its goal (worst shape)"
    return {"name": name, "ratio": worst, "goal": 1.0, "better": "higher", "shapes": rows}
