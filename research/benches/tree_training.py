"""Forward and backward of a batch of paths: packed as one forest, against padded rows and against
unshared packing (varlen).

The speed-up is compared with the token ratio (path tokens over packed tokens) and with the most
that sharing can save by arithmetic (``limit``). The model has ten layers of the default model's
shape with random weights, all trained, on one thread. Only lengths and shared prefixes matter:
those of ``slate`` come from a real batch, the others have half of their real lengths.

``python -m coppice.research.benches.tree_training`` measures a SLATE batch on a GPU; coppice dev
gpu-check runs it."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest.head import token_logprobs
from coppice.learner.forest.trees import Path, pack
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from coppice.research.benches import result
from coppice.research.benches.prefill import random_copy
from coppice.research.packers import step_candidates
from coppice.tools.planning.formulas import Dense
from coppice.tools.planning.growth import packed

LAYERS, PADDED_ROWS = 10, 4
GOALS = {"slate": 0.7, "mc_pr": 0.6}
"""The least share of the token ratio that the speed-up must reach. Other shapes need only be no
slower than padded rows."""
SIZE = Dense(LAYERS, 576, 1536, 9, 49_152, 3)
"""The model: layers of the default model's shape."""
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Peak of dense bf16 products, from the vendor's data sheets."""
GPU_REPEATS = 5
GPU_UNSHARED_TOKENS = 16_384
"""Unshared paths are computed in packings of at most this many tokens on a GPU: the block mask of
the whole batch, 80,000 tokens, would take about 55 GiB while it is made."""
VOCABULARY = 49152
"""Token ids are below this number."""


def _words(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCABULARY, count).tolist()


def slate(rng: np.random.Generator) -> list[Path]:
    """Make one question with five actions from one prefix at every step, one of which is
    continued."""
    return [Path(*one) for one in step_candidates(partial(_words, rng), 200, 4, 5, 80, 400)]


def grpo(rng: np.random.Generator) -> list[Path]:
    """Make eight answers to one prompt."""
    return [Path(*one) for one in step_candidates(partial(_words, rng), 500, 1, 8, 100, 0)]


def mc_pr(
    rng: np.random.Generator, prompt: int = 100, states: int = 4, n: int = 12, turn: int = 32
) -> list[Path]:
    """Make n continuations of one turn from each state of a trajectory."""
    paths, prefix = [], _words(rng, prompt)
    for _ in range(states):
        paths += [Path(prefix + _words(rng, turn), len(prefix)) for _ in range(n)]
        prefix = prefix + _words(rng, 2 * turn)
    return paths


def episodes(rng: np.random.Generator) -> list[Path]:
    """Make six whole game episodes of four turns that share only the prompt. Each is one path,
    trained from the end of the prompt on."""
    return [Path(*one) for one in step_candidates(partial(_words, rng), 100, 1, 6, 120, 0)]


SHAPES = {"slate": slate, "grpo": grpo, "mc_pr": mc_pr, "episodes": episodes}


# ------------------------------------------------------------------------------------- measurements


def limit(paths: Sequence[Path]) -> float:
    """Return the multiplications of the unshared paths over those of their forest. Trained tokens
    that paths share pass the head once."""
    work = packed([paths], sum(len(path.tokens) for path in paths), 1)
    unshared = SIZE.multiplications(work["path"], work["path_pairs"], work["path_targets"])
    return unshared / SIZE.multiplications(work["packed"], work["pairs"], work["targets"])


def forest(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute as the learner does, which shares prefixes where sharing pays."""
    model.read(pack(paths, share=None))[0].sum().backward()


def varlen(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute packed rows without sharing."""
    model.read(pack(paths, share=False))[0].sum().backward()


def varlen_in_pieces(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute unshared packings of at most GPU_UNSHARED_TOKENS tokens, one after the other."""
    piece, tokens = list[Path](), 0
    for path in paths:
        if piece and tokens + len(path.tokens) > GPU_UNSHARED_TOKENS:
            varlen(model, piece)
            piece, tokens = [], 0
        piece.append(path)
        tokens += len(path.tokens)
    varlen(model, piece)


def padded(model: TreeModel, paths: Sequence[Path]) -> None:
    """Compute rows padded to the longest of their batch, with the model's own attention."""
    causal = model.causal
    for first in range(0, len(paths), PADDED_ROWS):
        some = paths[first : first + PADDED_ROWS]
        longest = max(len(p.tokens) for p in some)
        ids = torch.tensor([[*p.tokens] + [0] * (longest - len(p.tokens)) for p in some])
        mask = torch.tensor([[1] * len(p.tokens) + [0] * (longest - len(p.tokens)) for p in some])
        output = causal.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
        hidden = output.last_hidden_state
        rows = torch.cat([hidden[i, p.start - 1 : len(p.tokens) - 1] for i, p in enumerate(some)])
        targets = torch.tensor([t for p in some for t in p.tokens[p.start :]])
        token_logprobs(rows, causal.get_output_embeddings().weight, targets)[0].sum().backward()


def seconds(
    work: Callable[[TreeModel, Sequence[Path]], None], model: TreeModel, paths: Sequence[Path]
) -> float:
    """Return the CPU seconds of one forward and backward (not wall time, because the machine is
    shared)."""
    model.tower.zero_grad(set_to_none=True)
    start = time.process_time()
    work(model, paths)
    return time.process_time() - start


def measure(model: TreeModel, name: str) -> dict[str, Any]:
    """Measure one shape."""
    paths = SHAPES[name](np.random.default_rng(0))
    forested = pack(paths)
    sides = {"forest": forest, "varlen": varlen, "padded": padded}
    cpu_s = {side: seconds(work, model, paths) for side, work in sides.items()}
    return {
        "shape": name, "tokens": forested.nodes, "token_ratio": forested.token_ratio,
        "limit": limit(paths), "over_padded": cpu_s["padded"] / cpu_s["forest"],
        "over_varlen": cpu_s["varlen"] / cpu_s["forest"], "cpu_s": cpu_s,
    }  # fmt: skip


def run() -> dict[str, Any]:
    """Measure all shapes. The ratio is the worst speed-up over its goal, so a ratio of 1 or more
    means that every goal is met."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            random_copy(FilePath(folder), num_hidden_layers=LAYERS)
            settings = LearnerConfig(dtype="float32", lora=LoraConfig(rank=0))
            model = TreeModel(folder, settings, 1.0, Ranks(60))
            seconds(forest, model, grpo(np.random.default_rng(1)))  # warms the allocator
            rows = [measure(model, name) for name in SHAPES]
    finally:
        torch.set_num_threads(threads)
    worst = min(
        r["over_padded"] / (GOALS[r["shape"]] * r["token_ratio"] if r["shape"] in GOALS else 1.0)
        for r in rows
    )
    return result("tree training: speed-up / its goal (worst shape)", worst, 1.0, shapes=rows)


# ----------------------------------------------------------------------------------------- on a GPU


def _gpu_seconds(work: Callable[..., None], model: TreeModel, paths: list[Path]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work(model, paths)  # compiles the kernels
    begin.record()
    for _ in range(GPU_REPEATS):
        model.tower.zero_grad(set_to_none=True)
        work(model, paths)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / GPU_REPEATS


def measure_gpu() -> dict[str, Any]:
    """Measure a SLATE batch on a GPU in bf16, as one forest with FlexAttention and unshared.

    Returns the seconds of both, the speed-up against the token ratio, and the forest's share of the
    peak (matrix products only).
    """
    with tempfile.TemporaryDirectory() as folder:
        random_copy(FilePath(folder))
        settings = LearnerConfig(dtype="bfloat16", kl_coef=0.0)
        model = TreeModel(folder, settings, 1.0, Ranks(60), lora=LoraConfig(rank=0))
        rng = np.random.default_rng(0)
        paths = [p for _ in range(4) for p in slate(rng)]
        forested = pack(paths)
        shared = _gpu_seconds(forest, model, paths)
        unshared = _gpu_seconds(varlen_in_pieces, model, paths)
    weights = sum(p.numel() for n, p in model.tower.named_parameters() if "layers" in n)
    name = torch.cuda.get_device_name()
    peak = next((v for key, v in PEAK_TFLOPS.items() if key in name), None)
    tflops = 6 * weights * forested.nodes / shared / 1e12
    return {
        "device": name, "packed_tokens": forested.nodes, "token_ratio": forested.token_ratio,
        "forest_s": shared, "unshared_s": unshared, "speed_up": unshared / shared,
        "share_of_token_ratio": unshared / shared / forested.token_ratio, "tflops": tflops,
        "share_of_peak": None if peak is None else tflops / peak,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure_gpu()))
