"""How the paths of an update are cut into forwards and distributed over the ranks, and how their
values become arrays of all tokens.

Every rank computes the same plan. Sharded ranks (FSDP2) must make equally many forwards, so a rank
with fewer forwards repeats one with weight 0.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from coppice.learner.forest.trees import Forest, Path, Trie, balanced, share
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.table import TurnTokens


class Rows(msgspec.Struct, frozen=True):
    """The turns of an update as paths, with their trie. spans[i]: the slice of path i's action
    tokens on the flat token axis.

    forests: the forests that were packed so far. Passes that cut the batch in the same way read the
    same forests.
    """

    paths: list[Path]
    trie: Trie
    spans: list[slice]
    behaviour: np.ndarray
    sampled: np.ndarray
    versions: np.ndarray
    forests: dict[tuple[int, ...], Forest] = {}

    @property
    def tokens(self) -> int:
        """Length of the token axis."""
        return len(self.behaviour)

    def index(self, rows: Sequence[int]) -> np.ndarray:
        """Return the token indices of some paths in order, as a numpy int64 array, since numpy
        treats a tensor of one element as a scalar."""
        return np.concatenate([np.arange(self.spans[i].start, self.spans[i].stop) for i in rows])

    def forest(self, rows: Sequence[int]) -> Forest:
        """Return some paths packed. Their prefixes are shared if that saves time."""
        key = tuple(rows)
        if key not in self.forests:
            self.forests[key] = self.trie.forest(key)
        return self.forests[key]


def rows_of(turns: list[TurnTokens]) -> Rows:
    """Return the rows of a batch."""
    ends = np.cumsum([len(turn.action) for turn in turns]).tolist()
    paths = [
        Path(
            np.concatenate([t.prefix, t.action]).astype(np.int64),
            len(t.prefix),
            t.pictures,
            t.support,
        )
        for t in turns
    ]
    return Rows(
        paths,
        Trie(paths),
        [slice(end - len(turn.action), end) for end, turn in zip(ends, turns, strict=True)],
        np.concatenate([turn.logprobs for turn in turns]).astype(np.float32),
        np.concatenate([turn.sampled for turn in turns]),
        np.concatenate([turn.versions for turn in turns]),
    )


class Plan(msgspec.Struct, frozen=True):
    """The forwards of one pass.

    densest: the rows of the micro-batch that shares most. mine: this rank's micro-batches as (rows,
    filler). forwarded: the packed tokens of all ranks. whole: the packed tokens of the uncut
    forest, so forwarded / whole is the cost of repeated trunks.
    """

    densest: list[int]
    mine: list[tuple[list[int], bool]]
    forwarded: int
    whole: int


def plan(trie: Trie, rows: Sequence[int], budget: int, ranks: Ranks) -> Plan:
    """Cut the paths ``rows`` into micro-batches of at most ``budget`` packed tokens. The cut with
    the smallest load of the busiest rank wins, and the largest micro-batch goes first to the least
    busy rank."""
    where = trie.cuts(rows)
    batches, sizes = balanced(where, budget, ranks.count)
    shares = share(sizes, ranks.count)
    mine = [(batches[b], False) for b in shares[ranks.rank]]
    if ranks.sharded:
        lightest = batches[min(range(len(sizes)), key=sizes.__getitem__)]
        mine += [(lightest, True)] * (max(map(len, shares)) - len(mine))
    ratios = [
        sum(len(trie.spines[i]) for i in b) / size for b, size in zip(batches, sizes, strict=True)
    ]
    return Plan(batches[int(np.argmax(ratios))], mine, sum(sizes), where.whole)


def sweep(
    rows: Rows, steps: Plan, ranks: Ranks, read: Callable[[Forest], torch.Tensor]
) -> np.ndarray:
    """Apply ``read`` (a forest -> values of its action tokens) to the whole batch. Returns float32
    [tokens], equal on all ranks."""
    swept = torch.zeros(rows.tokens)
    for chosen, filler in steps.mine:
        values = read(rows.forest(chosen))
        if not filler:
            swept[rows.index(chosen)] = values.detach().float().cpu()
    return ranks.add(swept).numpy()
