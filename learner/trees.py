"""Tree packing: the turns of an update, which arrive as nodes of many trees, become one forest in which a shared prefix stands once.

Layout: depth-first pre-order of the token trie; position = depth; ``end[k]`` is the exclusive end of k's subtree, so k is an
ancestor-or-self of q iff k <= q < end[k]. A token attends to its ancestors (learner/attention.py). Equal to path-by-path training to rounding, because
every hidden state depends on its ancestors only. Targets stay per path: a branch's first token reads its parent's last logits.

The trie is found again from the whole token paths instead of being taken over from the nodes and their parents: so equal prefixes of
different trees are shared too (a common instruction), and nothing but token ids decides what is shared. It is found once per update
(``Trie``); every pass of every model takes its micro-batches out of it.
"""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np


class Path(msgspec.Struct, frozen=True):
    """One trained turn: its tokens and where its action starts."""

    tokens: Sequence[int] | np.ndarray
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


SHARE_FROM = 1.15
"""Token ratio from which a forest is shared: below, the blocks of shared trunks cost more than their tokens."""


class Trie:
    """The token trie of all paths of an update. Sorted paths visit it depth first, so a subtree is one slice of its nodes.

    ``forest`` packs some of the paths, ``cuts`` says where they may be cut into micro-batches; neither compares tokens again.
    """

    def __init__(self, paths: Sequence[Path]):
        rows = [np.asarray(path.tokens, np.int64) for path in paths]
        self.starts = [path.start for path in paths]
        self.order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
        self.rank = np.argsort(self.order)
        most = sum(map(len, rows))
        self.tokens, self.depth, self.end = (np.empty(most, np.int64) for _ in range(3))
        self.spines: list[np.ndarray] = [np.zeros(0, np.int64)] * len(rows)
        """The trie's nodes of each path, int64 [tokens of the path]."""
        self.common: list[int] = []
        """Tokens that each path, in sorted order, shares with the one before."""
        size, last, spine = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
        for index in self.order:
            row = rows[index]
            both = min(len(last), len(row))
            differ = np.flatnonzero(last[:both] != row[:both])
            shared = int(differ[0]) if len(differ) else both
            self.end[spine[shared:]] = size
            fresh = np.arange(size, size + len(row) - shared)
            self.tokens[fresh], self.depth[fresh] = row[shared:], np.arange(shared, len(row))
            size, last, spine = size + len(fresh), row, np.concatenate([spine[:shared], fresh])
            self.spines[index] = spine
            self.common.append(shared)
        self.end[spine] = size

    def forest(self, rows: Sequence[int], share: bool | None = None) -> Forest:
        """The forest of the paths ``rows``. share: False keeps every path whole (the packed path-by-path reference), None where sharing
        pays, True always."""
        spines = [self.spines[i] for i in rows]
        lengths, nodes = [len(spine) for spine in spines], np.concatenate(spines)
        kept = np.unique(nodes)
        if share is None:
            share = len(nodes) >= SHARE_FROM * len(kept)
        if share:
            end, own = np.searchsorted(kept, self.end[kept]), np.searchsorted(kept, nodes)
        else:
            kept, end, own = nodes, np.repeat(np.cumsum(lengths), lengths), np.arange(len(nodes))
        read = [one[self.starts[i] - 1 : -1] for i, one in zip(rows, _split(own, lengths), strict=True)]
        target = [self.tokens[spine[self.starts[i] :]] for i, spine in zip(rows, spines, strict=True)]
        return Forest(
            self.tokens[kept],
            self.depth[kept],
            end,
            np.concatenate(read),
            np.concatenate(target),
            len(nodes),
            len(kept),
        )

    def cuts(self, rows: Sequence[int]) -> "Cuts":
        """Where the paths ``rows`` may be cut."""
        places = np.sort(self.rank[list(rows)]).tolist()
        order = [self.order[place] for place in places]
        shared = [0] + [min(self.common[a + 1 : b + 1]) for a, b in itertools.pairwise(places)]
        length = [len(self.spines[i]) for i in order]
        return Cuts(order, length, [tokens - known for tokens, known in zip(length, shared, strict=True)])


def _split(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


def pack(paths: Sequence[Path], share: bool | None = True) -> Forest:
    """The forest of ``paths``. Equal tokens after equal prefixes become one node, across trees too; ``share`` as in ``Trie.forest``."""
    return Trie(paths).forest(range(len(paths)), share)


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

    length: tokens of each path in that order; added: those that its left neighbour does not have already.
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
    return Trie(paths).cuts(range(len(paths)))


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
