"""Tree packing: the turns of an update arrive as nodes of many trees and become one forest, which
holds each shared prefix once.

Layout: depth-first pre-order of the token trie; position = depth; ``end[k]`` is the exclusive end
of k's subtree, so k is an ancestor-or-self of q iff k <= q < end[k]. A token attends to its
ancestors (learner/forest/attention.py). The result equals path-by-path training up to rounding, because a
hidden state depends only on its ancestors. Targets stay per path: a branch's first token reads its
parent's last logits.

The trie is computed from the complete token paths, not from the nodes and their parents. Equal
prefixes of different trees (a common instruction) are therefore shared too, and only token ids
decide what is shared. Each update builds one ``Trie``, and every pass of every model cuts its
micro-batches from this trie.
"""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from coppice.common.support import Support, joined


class Path(msgspec.Struct, frozen=True):
    """One trained turn: all tokens up to its end, and the index at which its action starts.

    pictures: the PNG bytes of (at least) the pictures among its tokens, by number
    (``common.vision``). support: what top-p and top-k left to sample each action token from, None for
    the whole vocabulary.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    pictures: Mapping[int, bytes] = {}
    support: Support | None = None


class Forest(msgspec.Struct, frozen=True):
    """Packed paths. tokens, depth, end: int64 [nodes]. read[i]: the node whose hidden state
    predicts target[i], in the order of the paths.

    path_tokens: the tokens of all paths. nodes: the number of packed tokens, without the filler
    nodes of ``filled``. pictures: as in ``Path``. support: that of all targets.
    """

    tokens: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    read: np.ndarray
    target: np.ndarray
    path_tokens: int
    nodes: int
    pictures: Mapping[int, bytes] = {}
    support: Support | None = None

    @property
    def token_ratio(self) -> float:
        """Path tokens / packed tokens: the factor that sharing prefixes saves."""
        return self.path_tokens / self.nodes


SHARE_FROM = 1.15
"""The smallest token ratio at which prefixes are shared. Below it, the attention blocks of shared
trunks cost more than the saved tokens."""


class Trie:
    """The token trie of all paths of an update. Sorted paths visit the trie depth first, so a
    subtree is one slice of the nodes.

    ``forest`` packs some of the paths, and ``cuts`` says where they may be cut into micro-batches.
    Neither compares tokens again. Example: ``Trie([Path([1, 2, 3], 1), Path([1, 2, 4], 1)])`` has
    four nodes, 1, 2, 3 and 4, because both paths share 1 and 2.
    """

    def __init__(self, paths: Sequence[Path]):
        rows = [np.asarray(path.tokens, np.int64) for path in paths]
        self.starts = [path.start for path in paths]
        self.supports = [path.support for path in paths]
        # the paths of an update have one mapping together
        shown = {id(path.pictures): path.pictures for path in paths}
        self.pictures = {
            number: png for pictures in shown.values() for number, png in pictures.items()
        }
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
        read = [
            one[self.starts[i] - 1 : -1] for i, one in zip(rows, _split(own, lengths), strict=True)
        ]
        target = [
            self.tokens[spine[self.starts[i] :]] for i, spine in zip(rows, spines, strict=True)
        ]
        tokens, depth = self.tokens[kept], self.depth[kept]
        support = joined([self.supports[i] for i in rows], list(map(len, target)))
        read, target = np.concatenate(read), np.concatenate(target)
        return Forest(
            tokens, depth, end, read, target, len(nodes), len(kept), self.pictures, support
        )

    def cuts(self, rows: Sequence[int]) -> "Cuts":
        """Return the places at which the paths ``rows`` may be cut."""
        places = np.sort(self.rank[list(rows)]).tolist()
        order = [self.order[place] for place in places]
        shared = [0] + [min(self.common[a + 1 : b + 1]) for a, b in itertools.pairwise(places)]
        length = [len(self.spines[i]) for i in order]
        return Cuts(
            order, length, [tokens - known for tokens, known in zip(length, shared, strict=True)]
        )


def _split(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


def pack(paths: Sequence[Path], share: bool | None = True) -> Forest:
    """Return the forest of ``paths``. Equal tokens after equal prefixes become one node, also
    across trees. share: see ``Trie.forest``."""
    return Trie(paths).forest(range(len(paths)), share)


def filled(forest: Forest, bucket: int) -> Forest:
    """Return the forest with isolated filler nodes, so that its size is a multiple of ``bucket``:
    compiled attention needs static shapes."""
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
    """Where a batch may be cut. order: indices of the paths, sorted so that neighbours share the
    longest prefixes.

    length: the tokens of each path in this order. added: the tokens of each path that its left
    neighbour does not share.
    """

    order: list[int]
    length: list[int]
    added: list[int]

    @property
    def whole(self) -> int:
        """The packed tokens of the uncut forest."""
        return sum(self.added)


def cuts(paths: Sequence[Path]) -> Cuts:
    """Return the places at which ``paths`` may be cut."""
    return Trie(paths).cuts(range(len(paths)))


def micro_batches(where: Cuts, budget: int) -> tuple[list[list[int]], list[int]]:
    """Cut the paths into forests of at most ``budget`` packed tokens (a longer path is a forest of
    its own). Returns the path indices and the size of each forest. A trunk that is cut is repeated
    on both sides of the cut."""
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
    """Cut the paths into micro-batches of at most ``budget`` packed tokens, as ``micro_batches``
    does. The cut with the smallest load of the busiest rank wins."""
    fair = max(1, -(-where.whole // ranks))
    tried = [micro_batches(where, min(budget, int(fair * slack))) for slack in SLACK]
    return min(tried, key=lambda cut: (_busiest(cut[1], ranks), sum(cut[1])))


def _busiest(sizes: list[int], ranks: int) -> int:
    return max(sum(sizes[i] for i in mine) for mine in share(sizes, ranks))


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
