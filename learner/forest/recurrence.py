"""Layers that hand a state from token to token (gated DeltaNet, Mamba2, short convolutions) follow
a forest: each segment starts from the state in which its parent ends. tree-recurrence runs them."""

import dataclasses
from typing import Any

import numpy as np
import torch

from coppice.learner.forest.trees import Forest


def install(model: Any) -> str:
    """Let the recurrent layers of ``model`` read segments; "" if all do or it has none, else why
    they cannot. Falcon-H1's layers are Mamba2's beside attention."""
    import tree_recurrence

    mamba = tree_recurrence.tree_family(["mamba2"])
    assert mamba is not None
    more = {"model_types": "falcon_h1", "mixers": "FalconH1Mixer", "layer_types": "hybrid"}
    names: dict[str, Any] = {key: (*getattr(mamba, key), name) for key, name in more.items()}
    tree_recurrence.register_family(dataclasses.replace(mamba, **names))
    support = tree_recurrence.install(model)
    return "" if support.shares_prefixes else support.reason


def segments(forest: Forest, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward that describe the runs of nodes without a branch: their
    bounds int32 [segments + 1], and the segment before each int32 [segments], -1 for a root."""
    end, depth = np.asarray(forest.end), np.asarray(forest.depth)
    child = np.zeros(len(end), bool)
    child[1:] = (depth[1:] == depth[:-1] + 1) & (end[1:] == end[:-1])
    starts = np.flatnonzero(~child)
    bounds = np.append(starts, len(end))
    open_segments: list[int] = []
    parents: list[int] = []
    for number, start in enumerate(starts.tolist()):
        while open_segments and end[starts[open_segments[-1]]] <= start:
            open_segments.pop()
        parents.append(open_segments[-1] if open_segments else -1)
        open_segments.append(number)
    arrays = {"tree_cu_seqlens_q": bounds, "tree_segment_parents": np.array(parents)}
    return {key: torch.as_tensor(a, dtype=torch.int32, device=device) for key, a in arrays.items()}
