"""A radix tree of token sequences with their keys and values, or of prefixes alone, to count the
tokens that an ideal cache would compute.

Invariant: in the order of eviction every segment precedes its parent, so the first is always a
leaf. Each segment owns its memory (a split copies both halves), so an eviction frees exactly the
bytes that it counts. A caller copies the matched pieces at once, so no segment is pinned.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec
import numpy as np
import torch

Read = Callable[[int, int], torch.Tensor]
"""Returns copied keys and values of a range of tokens: [layers, 2, kv_heads, tokens, head_dim]."""


class Match(msgspec.Struct):
    """The longest cached prefix: its length and pieces, to be copied at once. ending: the final
    hidden state [hidden] behind the whole sequence, if an earlier prompt ended there."""

    length: int
    pieces: list[torch.Tensor]
    ending: torch.Tensor | None


class Segment:
    """An edge of the tree: its tokens, int32 [tokens], with their keys and values."""

    __slots__ = ("children", "ending", "kv", "parent", "tokens")

    def __init__(self, tokens: np.ndarray, kv: torch.Tensor | None, parent: "Segment | None"):
        self.tokens, self.kv, self.parent = tokens, kv, parent
        self.ending: torch.Tensor | None = None
        self.children: dict[int, Segment] = {}
        if parent is not None:
            parent.children[int(tokens[0])] = self

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + sum(t.nbytes for t in (self.kv, self.ending) if t is not None)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    return int(np.append(a[:shorter] != b[:shorter], True).argmax())  # the first difference, or end


class RadixCache:
    """The keys and values of one policy version, of at most ``budget`` bytes.

        match = cache.match(prompt)  # copy match.pieces at once, then compute the other tokens
        cache.insert(prompt, read)   # calls read(match.length, len(prompt)) for the new tokens

    A new version must begin with ``clear``.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.evicted_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything, as for a new policy version. This does not count as eviction."""
        self.bytes = 0
        self._root = Segment(np.empty(0, np.int32), None, None)
        self._order: OrderedDict[Segment, None] = OrderedDict()

    def match(self, tokens: np.ndarray) -> Match:
        """Return the longest cached prefix of ``tokens``, int32 [tokens], now marked as used."""
        path, length, shared = self._walk(tokens)
        self._touch(path)
        pieces = [segment.kv for segment in path if segment.kv is not None]
        whole = bool(path) and shared == len(path[-1].tokens)
        if pieces and not whole:
            pieces[-1] = pieces[-1][:, :, :, :shared]
        return Match(length, pieces, path[-1].ending if whole and length == len(tokens) else None)

    def insert(
        self, tokens: np.ndarray, read: Read | None = None, ending: torch.Tensor | None = None
    ) -> int:
        """Keep ``tokens``; ``read`` returns the keys and values of the new ones. Return their
        number. ending: a copy of the final hidden state after the last token."""
        path, length, shared = self._walk(tokens)
        new = len(tokens) - length
        if path and shared < len(path[-1].tokens) and (new or ending is not None):
            path[-1] = self._split(path[-1], shared)
        if new:
            kv = read(length, len(tokens)) if read is not None else None
            leaf = Segment(tokens[length:].copy(), kv, path[-1] if path else self._root)
            self._order[leaf] = None
            self.bytes += leaf.bytes
            path.append(leaf)
        if ending is not None and path and path[-1].ending is None:
            path[-1].ending = ending
            self.bytes += ending.nbytes
        self._touch(path)
        self.limit(self.budget)
        return new

    def limit(self, budget: int) -> None:
        """Bound the cache to ``budget`` bytes: evict the least recently used leaves."""
        self.budget = budget
        while self.bytes > budget:
            oldest, _ = self._order.popitem(last=False)
            assert oldest.parent is not None and not oldest.children
            del oldest.parent.children[int(oldest.tokens[0])]
            self.bytes -= oldest.bytes
            self.evicted_tokens += len(oldest.tokens)

    def _walk(self, tokens: np.ndarray) -> tuple[list[Segment], int, int]:
        """Return the longest cached prefix's segments, its length, and that in the last one."""
        path: list[Segment] = []
        node, length, shared = self._root, 0, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            shared = common_length(child.tokens, tokens[length:])
            length += shared
            path.append(child)
            if shared < len(child.tokens):
                break
            node = child
        return path, length, shared

    def _touch(self, path: list[Segment]) -> None:
        for segment in reversed(path):
            self._order.move_to_end(segment)

    def _split(self, segment: Segment, at: int) -> Segment:
        """Cut an edge in two and return its first part, which the caller must touch."""
        head = Segment(segment.tokens[:at].copy(), _part(segment.kv, 0, at), segment.parent)
        self._order[head] = None
        segment.kv = _part(segment.kv, at, len(segment.tokens))
        segment.tokens, segment.parent = segment.tokens[at:].copy(), head
        head.children[int(segment.tokens[0])] = segment
        return head


def _part(kv: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    return kv[:, :, :, start:end].clone() if kv is not None else None
