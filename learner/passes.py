"""How the paths of an update are cut into forwards and shared over the ranks, and how token arrays come back from them.

Every rank makes the same plan. Sharded ranks (FSDP2) must make equally many forwards, so a shorter share is filled up with
repetitions that carry no weight.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from learner.ranks import Ranks
from learner.table import TurnTokens
from learner.trees import Forest, Path, Trie, micro_batches, share


class Rows(msgspec.Struct, frozen=True):
    """The turns of an update as paths, with their trie. spans[i]: where the action tokens of path i lie on the flat token axis.

    forests: those that were packed so far; passes that cut the batch alike read the same ones.
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
        """Token indices of some paths, in order, int64. No tensor: numpy takes a tensor of one element for a scalar."""
        return np.concatenate([np.arange(self.spans[i].start, self.spans[i].stop) for i in rows])

    def forest(self, rows: Sequence[int]) -> Forest:
        """Some paths packed, shared where that pays."""
        key = tuple(rows)
        if key not in self.forests:
            self.forests[key] = self.trie.forest(key)
        return self.forests[key]


def rows_of(turns: list[TurnTokens]) -> Rows:
    """The rows of a batch."""
    ends = np.cumsum([len(turn.action) for turn in turns]).tolist()
    paths = [Path(np.concatenate([turn.prefix, turn.action]).astype(np.int64), len(turn.prefix)) for turn in turns]
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

    densest: the rows of the micro-batch that shares most. mine: this rank's micro-batches as (rows, filler). forwarded: packed
    tokens of all ranks; whole: of the forest that was never cut, so forwarded / whole is what repeating trunks costs.
    """

    densest: list[int]
    mine: list[tuple[list[int], bool]]
    forwarded: int
    whole: int


SLACK = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Budgets tried, times a rank's fair share: a tighter one balances better, a looser one repeats fewer trunks."""


def plan(trie: Trie, rows: Sequence[int], budget: int, ranks: Ranks) -> Plan:
    """Micro-batches of at most ``budget`` packed tokens of the paths ``rows`` of an update, the heaviest first to the freest rank; cut so that the
    busiest rank has the least to do."""
    where = trie.cuts(rows)
    fair = max(1, -(-where.whole // ranks.count))
    tried = [micro_batches(where, min(budget, int(fair * slack))) for slack in SLACK]
    batches, sizes = min(tried, key=lambda made: (_busiest(made[1], ranks.count), sum(made[1])))
    shares = share(sizes, ranks.count)
    mine = [(batches[b], False) for b in shares[ranks.rank]]
    if ranks.sharded:
        lightest = batches[min(range(len(sizes)), key=sizes.__getitem__)]
        mine += [(lightest, True)] * (max(map(len, shares)) - len(mine))
    ratios = [sum(len(trie.spines[i]) for i in b) / size for b, size in zip(batches, sizes, strict=True)]
    return Plan(batches[int(np.argmax(ratios))], mine, sum(sizes), where.whole)


def _busiest(sizes: list[int], ranks: int) -> int:
    return max(sum(sizes[i] for i in mine) for mine in share(sizes, ranks))


def sweep(rows: Rows, steps: Plan, ranks: Ranks, read: Callable[[Forest], torch.Tensor]) -> np.ndarray:
    """``read`` (a forest -> values of its action tokens) over the whole batch: float32 [tokens], equal on all ranks."""
    made = torch.zeros(rows.tokens)
    for chosen, filler in steps.mine:
        values = read(rows.forest(chosen))
        if not filler:
            made[rows.index(chosen)] = values.detach().float().cpu()
    return ranks.add(made).numpy()
