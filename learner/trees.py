"""Tree packing: a batch of token paths becomes one forest in which a shared prefix stands once.

Layout: depth-first pre-order of the token trie; position = depth; ``end[k]`` is the exclusive end of k's subtree, so k is an
ancestor-or-self of q iff k <= q < end[k]. A token attends to its ancestors. Equal to path-by-path training to rounding, because
every hidden state depends on its ancestors only. Targets stay per path: a branch's first token reads its parent's last logits.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch


class Path(msgspec.Struct, frozen=True):
    """One trained turn: its tokens and where its action starts."""

    tokens: list[int]
    start: int


class Forest(msgspec.Struct, frozen=True):
    """Packed paths. tokens, depth, end: int64 [nodes]. read[i]: the node whose hidden state predicts target[i], paths in order."""

    tokens: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    read: np.ndarray
    target: np.ndarray
    path_tokens: int

    @property
    def token_ratio(self) -> float:
        """Path tokens over packed tokens: what sharing saves in the trunk."""
        return self.path_tokens / len(self.tokens)


def pack(paths: Sequence[Path]) -> Forest:
    """The forest of ``paths``. Equal tokens after equal prefixes become one node, across trees too (a common instruction)."""
    tokens: list[int] = []
    depth: list[int] = []
    parent: list[int] = []
    children: dict[tuple[int, int], int] = {}
    spine: dict[int, list[int]] = {}
    # Sorted paths visit the trie depth first, so a subtree is one contiguous slice.
    for index in sorted(range(len(paths)), key=lambda i: paths[i].tokens):
        node, nodes = -1, []
        for position, token in enumerate(paths[index].tokens):
            known = children.get((node, token))
            if known is None:
                known = len(tokens)
                children[node, token] = known
                tokens.append(token)
                depth.append(position)
                parent.append(node)
            node = known
            nodes.append(node)
        spine[index] = nodes
    end = np.arange(1, len(tokens) + 1)
    for node in range(len(tokens) - 1, -1, -1):
        if parent[node] >= 0:
            end[parent[node]] = max(end[parent[node]], end[node])
    read = [node for i, path in enumerate(paths) for node in spine[i][path.start - 1 : -1]]
    target = [token for path in paths for token in path.tokens[path.start :]]
    return Forest(
        np.array(tokens),
        np.array(depth),
        end,
        np.array(read),
        np.array(target),
        sum(len(path.tokens) for path in paths),
    )


def dense_masks(
    forest: Forest, layer_types: Sequence[str], window: int | None, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive attention masks [1, 1, nodes, nodes]: one, or one by layer type for models that mix full and sliding layers.

    A sliding window compares depths, not indices.
    """
    index = torch.arange(len(forest.tokens), device=device)
    end = torch.as_tensor(forest.end, device=device)
    depth = torch.as_tensor(forest.depth, device=device)
    ancestor = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])

    def additive(allowed: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]

    if set(layer_types) <= {"full_attention"}:
        return additive(ancestor)
    if window is None or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layers of kind {sorted(set(layer_types))} with window {window}: tree packing knows full and sliding"
        )
    near = ancestor & (depth[:, None] - depth[None, :] < window)
    return {"full_attention": additive(ancestor), "sliding_attention": additive(near)}


def micro_batches(paths: Sequence[Path], budget: int) -> list[list[int]]:
    """Indices of ``paths`` cut into forests of at most ``budget`` packed tokens (a single longer path stands alone).

    Neighbours in sorted order share the longest prefixes, so cutting there keeps the sharing high; the trunk is repeated in each.
    """
    batches: list[list[int]] = []
    size, last = 0, []
    for index in sorted(range(len(paths)), key=lambda i: paths[i].tokens):
        tokens = paths[index].tokens
        shared = next(
            (i for i, (a, b) in enumerate(zip(last, tokens, strict=False)) if a != b), min(len(last), len(tokens))
        )
        added = len(tokens) - shared
        if not batches or size + added > budget:
            batches.append([])
            size, added = 0, len(tokens)
        batches[-1].append(index)
        size += added
        last = tokens
    return batches


def packed_sizes(paths: Sequence[Path], batches: list[list[int]]) -> list[int]:
    """Packed tokens of each micro-batch."""
    return [len(pack([paths[i] for i in batch]).tokens) for batch in batches]


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Micro-batches by rank: the largest first, each to the rank with the least so far."""
    load = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares
