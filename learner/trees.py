"""Tree packing: a batch of token paths becomes one forest in which a shared prefix stands once.

Layout: depth-first pre-order of the token trie; position = depth; ``end[k]`` is the exclusive end of k's subtree, so k is an
ancestor-or-self of q iff k <= q < end[k]. A token attends to its ancestors (learner/attention.py). Equal to path-by-path training to rounding, because
every hidden state depends on its ancestors only. Targets stay per path: a branch's first token reads its parent's last logits.
"""

from collections.abc import Sequence

import msgspec
import numpy as np


class Path(msgspec.Struct, frozen=True):
    """One trained turn: its tokens and where its action starts."""

    tokens: list[int]
    start: int


class Forest(msgspec.Struct, frozen=True):
    """Packed paths. tokens, depth, end: int64 [nodes]. read[i]: the node whose hidden state predicts target[i], paths in order.

    path_tokens: tokens of all paths; nodes: packed tokens, without the filling of a bucketed forest.
    """

    tokens: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    read: np.ndarray
    target: np.ndarray
    path_tokens: int
    nodes: int

    @property
    def token_ratio(self) -> float:
        """Path tokens over packed tokens: what sharing saves in the trunk."""
        return self.path_tokens / self.nodes


def pack(paths: Sequence[Path], share: bool = True) -> Forest:
    """The forest of ``paths``. Equal tokens after equal prefixes become one node, across trees too (a common instruction).

    share = False keeps every path whole (the packed path-by-path reference).
    """
    tokens: list[int] = []
    depth: list[int] = []
    parent: list[int] = []
    children: dict[tuple[int, int], int] = {}
    spine: dict[int, list[int]] = {}
    # Sorted paths visit the trie depth first, so a subtree is one contiguous slice.
    for index in sorted(range(len(paths)), key=lambda i: paths[i].tokens):
        node, nodes = -1, []
        for position, token in enumerate(paths[index].tokens):
            known = children.get((node, token)) if share else None
            if known is None:
                known = len(tokens)
                children[node, token] = known
                tokens.append(token)
                depth.append(position)
                parent.append(node)
            node = known
            nodes.append(node)
        spine[index] = nodes
    end = list(range(1, len(tokens) + 1))
    for node in range(len(tokens) - 1, -1, -1):
        if parent[node] >= 0:
            end[parent[node]] = max(end[parent[node]], end[node])
    read = [node for i, path in enumerate(paths) for node in spine[i][path.start - 1 : -1]]
    target = [token for path in paths for token in path.tokens[path.start :]]
    return Forest(
        np.array(tokens), np.array(depth), np.array(end), np.array(read, np.int64), np.array(target, np.int64),
        sum(len(path.tokens) for path in paths), len(tokens),
    )  # fmt: skip


def filled(forest: Forest, bucket: int) -> Forest:
    """The forest with lone filler nodes up to a multiple of ``bucket``: static shapes for compiled attention."""
    more = -len(forest.tokens) % bucket
    size = len(forest.tokens)
    zeros = np.zeros(more, np.int64)
    return msgspec.structs.replace(
        forest,
        tokens=np.concatenate([forest.tokens, zeros]),
        depth=np.concatenate([forest.depth, zeros]),
        end=np.concatenate([forest.end, np.arange(size + 1, size + more + 1)]),
    )


class Cuts(msgspec.Struct, frozen=True):
    """Where a batch may be cut. order: indices of the paths, sorted, so that neighbours share the longest prefixes.

    length: int64 [paths], tokens of each path in that order; added: those that its left neighbour does not have already.
    """

    order: list[int]
    length: list[int]
    added: list[int]

    @property
    def whole(self) -> int:
        """Packed tokens of the forest that is never cut."""
        return sum(self.added)


def cuts(paths: Sequence[Path]) -> Cuts:
    """The places to cut ``paths``."""
    order = sorted(range(len(paths)), key=lambda i: paths[i].tokens)
    length, added, last = [], [], np.zeros(0, np.int64)
    for index in order:
        tokens = np.array(paths[index].tokens)
        both = min(len(last), len(tokens))
        differ = np.flatnonzero(last[:both] != tokens[:both])
        length.append(len(tokens))
        added.append(len(tokens) - int(differ[0] if len(differ) else both))
        last = tokens
    return Cuts(order, length, added)


def micro_batches(where: Cuts, budget: int) -> tuple[list[list[int]], list[int]]:
    """Indices of the paths cut into forests of at most ``budget`` packed tokens (a single longer path stands alone), and the size
    of each forest. The trunk that a cut goes through is repeated on both sides."""
    batches: list[list[int]] = []
    sizes: list[int] = []
    for index, length, added in zip(where.order, where.length, where.added, strict=True):
        if not batches or sizes[-1] + added > budget:
            batches.append([])
            sizes.append(0)
            added = length
        batches[-1].append(index)
        sizes[-1] += added
    return batches, sizes


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Micro-batches by rank: the largest first, each to the rank with the least so far."""
    load = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares
