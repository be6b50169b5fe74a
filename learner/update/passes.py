"""How the paths of an update are cut into forwards and distributed over the ranks, and how their
values become arrays of all tokens.

Every rank computes the same plan. Sharded ranks (FSDP2) must make equally many forwards, so a rank
with fewer forwards repeats one with weight 0.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from coppice.learner.forest.trees import Forest, Path, Trie, balanced, share
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks


class Rows:
    """The paths of an update with their trie. spans[i]: the slice of path i's action tokens on the
    flat axis of all ``tokens``. behaviour, sampled, versions: the sampling records [tokens]."""

    def __init__(self, paths: Sequence[Path]):
        self.paths, self.trie = paths, Trie(paths)
        ends = np.cumsum([len(path.sampled) for path in paths]).tolist()
        self.spans = [slice(end - len(p.sampled), end) for end, p in zip(ends, paths, strict=True)]
        self.behaviour = np.concatenate([path.logprobs for path in paths]).astype(np.float32)
        self.tokens = len(self.behaviour)
        self.sampled = np.concatenate([path.sampled for path in paths])
        self.versions = np.concatenate([path.versions for path in paths])
        self.forests: dict[tuple[int, ...], Forest] = {}

    def index(self, rows: Sequence[int]) -> np.ndarray:
        """Return the token indices of some paths in order, as a numpy int64 array, since numpy
        treats a tensor of one element as a scalar."""
        return np.concatenate([np.arange(self.spans[i].start, self.spans[i].stop) for i in rows])

    def forest(self, rows: Sequence[int]) -> Forest:
        """Return some paths packed, with shared prefixes if that saves time. Passes that cut the
        batch in the same way read the same forest."""
        key = tuple(rows)
        if key not in self.forests:
            self.forests[key] = self.trie.forest(key)
        return self.forests[key]


class Plan(msgspec.Struct, frozen=True):
    """The forwards of one pass.

    densest: the rows of the micro-batch that shares most. mine: this rank's micro-batches as (rows,
    filler). forwarded: the packed tokens of all ranks. whole: the packed tokens of the uncut
    forest, so forwarded / whole is the cost of repeated trunks. path_tokens: of the paths, shared
    ones each time.
    """

    densest: list[int]
    mine: list[tuple[list[int], bool]]
    forwarded: int
    whole: int
    path_tokens: int


def plan(trie: Trie, rows: Sequence[int], budget: int, ranks: Ranks) -> Plan:
    """Cut the paths ``rows`` into micro-batches of at most ``budget`` packed tokens, and give each
    to a rank (``balanced``, ``share``)."""
    where = trie.cuts(rows)
    batches, sizes = balanced(where, budget, ranks.computing)
    shares = share(sizes, ranks.computing) + [list[int]()] * (ranks.count - ranks.computing)
    mine = [(batches[b], False) for b in shares[ranks.rank]]
    if ranks.sharded:
        mine += [(batches[int(np.argmin(sizes))], True)] * (max(map(len, shares)) - len(mine))
    path_tokens = [sum(len(trie.spines[i]) for i in batch) for batch in batches]
    densest = int(np.argmax(np.divide(path_tokens, sizes)))
    return Plan(batches[densest], mine, sum(sizes), sum(where.added), sum(path_tokens))


def sweep(rows: Rows, steps: Plan, model: TreeModel, initial: bool = False) -> np.ndarray:
    """Return what ``model`` reads (``TreeModel.read``) of every action token, without gradient:
    log-probabilities or a critic's values, float32 [tokens], equal on all ranks."""
    swept = torch.zeros(rows.tokens)
    with model.inference():
        for chosen, filler in steps.mine:
            values = model.read(rows.forest(chosen), initial)[0]
            if not filler:
                swept[rows.index(chosen)] = values.float().cpu()
        return model.ranks.add(swept).numpy()
