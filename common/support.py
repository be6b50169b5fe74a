"""The support of a cut distribution: which tokens top-p and top-k left at each place of a sample.

As bytes: first the number of tokens left at every place, then their ids, place after place and
ascending, each as its distance from the id before (the first from 0). Every number is in LEB128:
seven bits per byte, the lowest first; the high bit says that another byte follows.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

_BITS, _MOST = 7, 5
"""Bits of a number in each byte, and the largest number of bytes: enough for 35 bits."""


class Support(msgspec.Struct, frozen=True):
    """counts: int64 [places], 0 where the whole vocabulary was left. ids: int64 [sum of the
    counts], ascending at each place."""

    counts: np.ndarray
    ids: np.ndarray

    @property
    def places(self) -> np.ndarray:
        """The place of each id, int64 [sum of the counts]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def has(self, tokens: np.ndarray) -> np.ndarray:
        """Return, as bool [places], whether the token at each place was left to sample from."""
        places, left = self.places, self.counts == 0
        left[places[self.ids == tokens[places]]] = True
        return left


def joined(supports: Sequence[Support | None], lengths: Sequence[int]) -> Support | None:
    """Return the supports of consecutive stretches as one. None is a stretch of ``lengths[i]``
    places with the whole vocabulary."""
    if all(support is None for support in supports):
        return None
    none = np.zeros(0, np.int64)
    pairs = zip(supports, lengths, strict=True)
    counts = [np.zeros(n, np.int64) if part is None else part.counts for part, n in pairs]
    ids = [none if part is None else part.ids for part in supports]
    return Support(np.concatenate(counts), np.concatenate(ids))


def encode(left: Sequence[np.ndarray | Sequence[int]]) -> bytes:
    """Return the bytes of a support, b"" if it cuts nothing. left: the ids left at each place, in
    any order; no id means the whole vocabulary."""
    if not any(map(len, left)):
        return b""
    rows = (np.diff(np.sort(np.asarray(ids, np.int64)), prepend=0) for ids in left)
    return b"".join(map(_leb128, [np.array([len(ids) for ids in left]), *rows]))


def spliced(first: bytes, places: int, kept: int, second: bytes, more: int) -> bytes:
    """Return, as bytes, the first ``kept`` of the ``places`` of one support, followed by the
    ``more`` places of another."""
    return encode([*_rows(first, places)[:kept], *_rows(second, more)])


def _rows(blob: bytes, places: int) -> Sequence[np.ndarray | Sequence[int]]:
    support = decode(blob, places)
    if support is None:
        return [()] * places
    return np.split(support.ids, np.cumsum(support.counts)[:-1])


def _leb128(numbers: np.ndarray) -> bytes:
    parts = numbers[:, None] >> _BITS * np.arange(_MOST)
    used, follows = parts > 0, np.pad(parts[:, 1:] > 0, ((0, 0), (0, 1)))
    used[:, 0] = True
    return ((parts & 127) | (follows << _BITS)).astype(np.uint8)[used].tobytes()


def decode(blob: bytes, places: int) -> Support | None:
    """Return the support of a sample of ``places`` tokens, None for b"". Raises ValueError if the
    bytes are not such a support."""
    if not blob:
        return None
    raw = np.frombuffer(blob, np.uint8).astype(np.int64)
    ends = np.flatnonzero(raw < 128) + 1
    starts = np.concatenate([[0], ends[:-1]])
    if not len(ends) or ends[-1] != len(raw) or (ends - starts).max() > _MOST:
        raise ValueError(
            f"a support of {len(raw)} bytes: expected numbers of at most {_MOST} bytes that all end"
        )
    within = np.arange(len(raw)) - np.repeat(starts, ends - starts)
    numbers = np.add.reduceat((raw & 127) << (_BITS * within), starts)
    counts, gaps = numbers[:places], numbers[places:]
    if len(counts) != places or counts.sum() != len(gaps):
        raise ValueError(
            f"a support of {len(numbers)} numbers for {places} sampled tokens: expected as many"
            f" counts, then {counts.sum()} ids"
        )
    total = np.concatenate([[0], np.cumsum(gaps)])
    return Support(counts, total[1:] - np.repeat(total[np.cumsum(counts) - counts], counts))
