"""The radix tree of token sequences with their keys and values, or of prefixes alone, to count the
tokens that an ideal cache would compute.

Each segment owns its memory (a split copies both halves), so an eviction frees exactly the bytes
that it counts. A caller copies the matched pieces at once, so no segment is pinned.
"""

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from coppice.common.radix import WIDTH, Edge, RadixTree

Read = Callable[[int, int], torch.Tensor]
"""Returns keys and values of a range of tokens, to be copied at once: [layers, 2, kv_heads, tokens,
head_dim]."""


class Match(msgspec.Struct):
    """The longest cached prefix: its length and pieces, to be copied at once. ending: the final
    hidden state [hidden] behind the whole sequence, if an earlier prompt ended there."""

    length: int
    pieces: list[torch.Tensor]
    ending: torch.Tensor | None


class Segment(Edge):
    """An edge with the keys and values of its tokens."""

    __slots__ = ("ending", "kv")

    def __init__(self, tokens: bytes, parent: Edge | None, kv: torch.Tensor | None = None):
        super().__init__(tokens, parent)
        self.kv, self.ending = kv, None

    @property
    def size(self) -> int:
        return len(self.tokens) + sum(t.nbytes for t in (self.kv, self.ending) if t is not None)


class RadixCache(RadixTree):
    """The keys and values of one policy version, of at most ``budget`` bytes. copied: copies them
    to memory of their own.

        match = cache.match(prompt)  # copy match.pieces at once, then compute the other tokens
        cache.insert(prompt, read)   # calls read(match.length, len(prompt)) for the new tokens

    A new version must begin with ``clear``.
    """

    edge = Segment

    def __init__(self, budget: float, copied: Callable[[torch.Tensor], torch.Tensor] = torch.clone):
        super().__init__(budget)
        self._copied = copied

    def match(self, tokens: np.ndarray) -> Match:
        """Return the longest cached prefix of ``tokens``, int32 [tokens], now marked as used."""
        path, length, shared = self._walk(tokens.tobytes())
        self._touch(path)
        pieces = [segment.kv for segment in path if segment.kv is not None]
        whole = bool(path) and shared * WIDTH == len(path[-1].tokens)
        if pieces and not whole:
            pieces[-1] = pieces[-1][:, :, :, :shared]
        return Match(length, pieces, path[-1].ending if whole and length == len(tokens) else None)

    def insert(
        self, tokens: np.ndarray, read: Read | None = None, ending: torch.Tensor | None = None
    ) -> int:
        """Keep ``tokens``; ``read`` returns the keys and values of the new ones. Return their
        number. ending: a copy of the final hidden state after the last token."""
        packed = tokens.tobytes()
        path, length, shared = self._walk(packed)
        new = len(tokens) - length
        if path and shared * WIDTH < len(path[-1].tokens) and (new or ending is not None):
            path[-1] = self._split(path[-1], shared)
        if new:
            kv = self._copied(read(length, len(tokens))) if read is not None else None
            leaf = Segment(packed[length * WIDTH :], path[-1] if path else self._root, kv)
            self.bytes += leaf.size
            path.append(leaf)
        if ending is not None and path and path[-1].ending is None:
            path[-1].ending = ending
            self.bytes += ending.nbytes
        self._touch(path)
        self.limit(self.budget)
        return new

    def _split(self, tail: Segment, at: int) -> Segment:
        """Cut a segment after ``at`` tokens. Returns its first part."""
        kv, parts = tail.kv, list[torch.Tensor | None]([None, None])
        if kv is not None:
            parts = [self._copied(part) for part in (kv[:, :, :, :at], kv[:, :, :, at:])]
        head = tail.split(at)
        head.kv, tail.kv = parts
        return head
