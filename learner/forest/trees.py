"""Tree packing: the turns of an update arrive as paths of many trees and become one forest, which
holds each shared prefix once.

Layout: depth-first pre-order of the token trie; position = depth; ``end[k]`` is the exclusive end
of k's subtree, so k is an ancestor-or-self of q iff k <= q < end[k]. A token attends to its
ancestors (attention.py). The result equals path-by-path training up to rounding, because a hidden
state depends only on its ancestors. Only token ids decide what is shared, so equal prefixes of
different trees (a common instruction) are shared too. A branch's first token reads its parent's
last logits.
"""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from coppice.common.support import Support, joined
from coppice.wire.messages import NO_EXPERT

_NONE = np.zeros(0)


class Path(msgspec.Struct, frozen=True):
    """All tokens up to the end of one action, and the index ``start`` at which the action begins.

    pictures: the PNG bytes of (at least) the pictures among its tokens, by number
    (``common.vision``). support: what top-p and top-k left to sample each action token from, None
    for the whole vocabulary. logprobs, versions, sampled: how each action token was sampled [action
    tokens]; empty for a path that is only read. experts: int16 [tokens, layers * k]
    (``common.routing``), None if no node told them.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    pictures: Mapping[int, bytes] = {}
    support: Support | None = None
    logprobs: np.ndarray = _NONE
    versions: np.ndarray = _NONE
    sampled: np.ndarray = _NONE
    experts: np.ndarray | None = None


class Forest(msgspec.Struct, frozen=True):
    """Packed paths. tokens, depth, end: int64 [nodes]. read[i]: the node whose hidden state
    predicts target[i], in the order of the paths. path_tokens: the tokens of all paths. nodes: the
    packed tokens, without the filler nodes of ``filled``. pictures, support: as in ``Path``.
    experts: int16 [nodes, layers * k] or None."""

    tokens: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    read: np.ndarray
    target: np.ndarray
    path_tokens: int
    nodes: int
    pictures: Mapping[int, bytes] = {}
    support: Support | None = None
    experts: np.ndarray | None = None

    @property
    def token_ratio(self) -> float:
        """Path tokens / packed tokens: the factor that sharing prefixes saves."""
        return self.path_tokens / self.nodes


SHARE_FROM = 1.15
"""The smallest token ratio at which prefixes are shared. Below it, the attention blocks of shared
trunks cost more than the saved tokens."""


class Trie:
    """The token trie of all paths of an update, from which every pass cuts its micro-batches
    without comparing tokens again. Sorted paths visit the trie depth first, so a subtree is one
    slice of the nodes.

    Example: ``Trie([Path([1, 2, 3], 1), Path([1, 2, 4], 1)])`` has four nodes, 1, 2, 3 and 4.
    """

    def __init__(self, paths: Sequence[Path]):
        rows = [np.asarray(path.tokens, np.int64) for path in paths]
        self.starts = [path.start for path in paths]
        self.supports = [path.support for path in paths]
        # the paths of an update have one mapping together
        shown = {id(path.pictures): path.pictures for path in paths}
        self.pictures = {n: png for pictures in shown.values() for n, png in pictures.items()}
        self.order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
        self.rank = np.argsort(self.order)
        most = sum(map(len, rows))
        self.tokens, self.depth, self.end = (np.empty(most, np.int64) for _ in range(3))
        self.spines: list[np.ndarray] = [np.zeros(0, np.int64)] * len(rows)
        """The nodes of each path in the trie, int64 [tokens of the path]."""
        self.common: list[int] = []
        """The number of tokens that each path, in sorted order, shares with the path before."""
        size, last, spine = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
        for index in self.order:
            row = rows[index]
            both = min(len(last), len(row))
            shared = int(np.append(last[:both] != row[:both], True).argmax())
            self.end[spine[shared:]] = size
            fresh = np.arange(size, size + len(row) - shared)
            self.tokens[fresh], self.depth[fresh] = row[shared:], np.arange(shared, len(row))
            size, last, spine = size + len(fresh), row, np.concatenate([spine[:shared], fresh])
            self.spines[index] = spine
            self.common.append(shared)
        self.end[spine] = size
        self.experts, self.conflicts = self._routed([path.experts for path in paths], size)

    def _routed(self, told: list[np.ndarray | None], size: int) -> tuple[np.ndarray | None, int]:
        """Return the experts of each node, None if no path has any, and the nodes for which paths
        disagree: the first path in order stays."""
        widths = {rows.shape[1] for rows in told if rows is not None}
        if not widths:
            return None, 0
        if len(widths) > 1:
            raise ValueError(
                f"nodes tell {sorted(widths)} experts of a token: expected one number, as from"
                " engines that all run the policy's model"
            )
        experts, conflicts = np.full((size, widths.pop()), NO_EXPERT, np.int16), 0
        for spine, rows in zip(self.spines, told, strict=True):
            if rows is None:
                continue
            before = experts[spine]
            blank = (before == NO_EXPERT).all(1)
            conflicts += int(((before != rows).any(1) & ~blank & (rows != NO_EXPERT).any(1)).sum())
            experts[spine[blank]] = rows[blank]
        return experts, conflicts

    def forest(self, rows: Sequence[int], share: bool | None = None) -> Forest:
        """Return the forest of the paths ``rows``. share: True shares prefixes, None shares them if
        that saves time, and False keeps every path complete (the packed path-by-path reference)."""
        spines = [self.spines[i] for i in rows]
        lengths, nodes = [len(spine) for spine in spines], np.concatenate(spines)
        kept = np.unique(nodes)
        if share is None:
            share = len(nodes) >= SHARE_FROM * len(kept)
        if share:
            end, own = np.searchsorted(kept, self.end[kept]), np.searchsorted(kept, nodes)
        else:
            kept, end, own = nodes, np.repeat(np.cumsum(lengths), lengths), np.arange(len(nodes))
        starts, owned = [self.starts[i] for i in rows], np.split(own, np.cumsum(lengths)[:-1])
        read = [path[start - 1 : -1] for start, path in zip(starts, owned, strict=True)]
        target = [self.tokens[path[start:]] for start, path in zip(starts, spines, strict=True)]
        support = joined([self.supports[i] for i in rows], list(map(len, target)))
        return Forest(
            self.tokens[kept], self.depth[kept], end, np.concatenate(read), np.concatenate(target),
            len(nodes), len(kept), self.pictures, support,
            None if self.experts is None else self.experts[kept],
        )  # fmt: skip

    def cuts(self, rows: Sequence[int]) -> "Cuts":
        """Return the places at which the paths ``rows`` may be cut."""
        places = np.sort(self.rank[list(rows)]).tolist()
        order = [self.order[place] for place in places]
        shared = [0] + [min(self.common[a + 1 : b + 1]) for a, b in itertools.pairwise(places)]
        length = [len(self.spines[i]) for i in order]
        added = [tokens - before for tokens, before in zip(length, shared, strict=True)]
        return Cuts(order, length, added)


def pack(paths: Sequence[Path], share: bool | None = True) -> Forest:
    """Return the forest of ``paths``. share: see ``Trie.forest``."""
    return Trie(paths).forest(range(len(paths)), share)


def filled(forest: Forest, bucket: int) -> Forest:
    """Return the forest with isolated filler nodes, so that its size is a multiple of ``bucket``:
    compiled attention needs static shapes."""
    size, more, experts = len(forest.tokens), -len(forest.tokens) % bucket, forest.experts
    if experts is not None:
        experts = np.pad(experts, ((0, more), (0, 0)), constant_values=NO_EXPERT)
    return msgspec.structs.replace(
        forest,
        tokens=np.pad(forest.tokens, (0, more)),
        depth=np.pad(forest.depth, (0, more)),
        end=np.concatenate([forest.end, np.arange(size + 1, size + more + 1)]),
        experts=experts,
    )


class Cuts(msgspec.Struct, frozen=True):
    """Where a batch may be cut. order: the paths, sorted so that neighbours share the longest
    prefixes. length: the tokens of each. added: those that its left neighbour does not share;
    together, the packed tokens of the uncut forest."""

    order: list[int]
    length: list[int]
    added: list[int]


def cuts(paths: Sequence[Path]) -> Cuts:
    return Trie(paths).cuts(range(len(paths)))


def micro_batches(where: Cuts, budget: int) -> tuple[list[list[int]], list[int]]:
    """Cut the paths into forests of at most ``budget`` packed tokens (a longer path is a forest of
    its own). Returns the path indices and the size of each forest."""
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


SLACK = (1.0, 1.1, 1.25, 1.5, 2.0)
"""The budgets to try, as factors of a rank's fair share. A smaller budget balances better, and a
larger one repeats fewer trunks."""


def balanced(where: Cuts, budget: int, ranks: int) -> tuple[list[list[int]], list[int]]:
    """Cut the paths as ``micro_batches`` does. The cut with the smallest load of the busiest rank
    wins."""

    def cost(cut: tuple[list[list[int]], list[int]]) -> tuple[int, int]:
        sizes = cut[1]
        return max(sum(sizes[i] for i in mine) for mine in share(sizes, ranks)), sum(sizes)

    fair = max(1, -(-sum(where.added) // ranks))
    return min((micro_batches(where, min(budget, int(fair * slack))) for slack in SLACK), key=cost)


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Distribute micro-batches over the ranks: the largest first, each to the rank with the
    smallest load so far."""
    load = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares
