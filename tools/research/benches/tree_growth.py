"""The cost of a trained token as one tree grows from 1.5k to 60k packed tokens, cut to a budget of 4,096 tokens as the learner cuts it.

The cost is the CPU seconds of forward and backward per trained token, of the largest tree against the smallest. The model has two layers
of the default model's shape and a small vocabulary, so that the layers and not the head are measured.
"""

import tempfile
import time
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from learner.config import LearnerConfig, LoraConfig
from learner.model import TreeModel
from learner.passes import plan
from learner.ranks import Ranks
from learner.trees import Path, Trie, pack
from tools.research.benches.slate_shape import random_copy
from tools.research.benches.tree_shapes import branching

LAYERS, VOCABULARY, BUDGET = 2, 4096, 4096
CONTINUED = (1, 2, 3, 5)


def make(folder: FilePath, ranks: Ranks) -> TreeModel:
    """Return the model with random weights."""
    random_copy(folder, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
    return TreeModel(str(folder), LearnerConfig(dtype="float32"), LoraConfig(rank=0), 1.0, ranks)


def measure(model: TreeModel, ranks: Ranks, continued: int) -> dict[str, float]:
    """Measure one tree. continued: how many actions of each step are continued."""
    shape = branching(np.random.default_rng(0), continued)
    paths = [Path([t % VOCABULARY for t in p.tokens], p.start) for p in shape]
    trained = sum(len(p.tokens) - p.start for p in paths)
    start = time.process_time()
    trie = Trie(paths)
    steps = plan(trie, range(len(paths)), BUDGET, ranks)
    for rows, _ in steps.mine:
        model.read(model.row(trie.forest(rows)))[0].sum().backward()
    spent = time.process_time() - start
    return {
        "packed_tokens": steps.whole,
        "token_ratio": pack(paths).token_ratio,
        "trained_tokens": trained,
        "trunk_repeat": steps.forwarded / steps.whole,
        "cpu_ms_per_trained_token": 1000 * spent / trained,
    }


def run() -> dict[str, Any]:
    """Measure all sizes, after an uncounted run of the smallest as a warm-up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(60)
            model = make(FilePath(folder), ranks)
            measure(model, ranks, CONTINUED[0])
            rows = [measure(model, ranks, continued) for continued in CONTINUED]
    finally:
        torch.set_num_threads(threads)
    ratio = rows[-1]["cpu_ms_per_trained_token"] / rows[0]["cpu_ms_per_trained_token"]
    name = "cost of a trained token: 60k-token tree / 1.5k-token tree"
    return {"name": name, "ratio": ratio, "goal": 1.25, "better": "lower", "trees": rows}
