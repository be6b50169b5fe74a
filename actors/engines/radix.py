"""A radix tree of token sequences that keeps their keys and values: a prefix is computed once and found by all its children.

Least recently used leaves go first when the byte budget is passed. Whoever matches copies at once, so nothing is pinned.
"""

import itertools
from collections.abc import Iterator

import torch


class Segment:
    """An edge of the tree: its tokens and their keys and values [layers, 2, kv_heads, tokens, head_dim]."""

    __slots__ = ("children", "kv", "parent", "tokens", "used")

    def __init__(self, tokens: list[int], kv: torch.Tensor | None, parent: "Segment | None"):
        self.tokens, self.kv, self.parent = tokens, kv, parent
        self.children: dict[int, Segment] = {}
        self.used = 0

    @property
    def bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size() if self.kv is not None else 0


def common_length(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class RadixCache:
    """Keys and values of one policy version under ``budget`` bytes."""

    def __init__(self, budget: int):
        self.budget = budget
        self.bytes = 0
        self.evicted_tokens = 0
        self._clock = itertools.count(1)
        self._root = Segment([], None, None)

    def match(self, tokens: list[int]) -> tuple[int, list[torch.Tensor]]:
        """Length of the longest cached prefix of ``tokens``, and its pieces in order (views, to be copied at once)."""
        pieces = []
        length = 0
        for segment, shared in self._walk(tokens):
            assert segment.kv is not None
            pieces.append(segment.kv[:, :, :, :shared])
            length += shared
        return length, pieces

    def _walk(self, tokens: list[int]) -> Iterator[tuple[Segment, int]]:
        now = next(self._clock)
        node, position = self._root, 0
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                return
            shared = common_length(child.tokens, tokens[position : position + len(child.tokens)])
            child.used = now
            yield child, shared
            if shared < len(child.tokens):
                return
            node, position = child, position + shared

    def insert(self, tokens: list[int], kv: torch.Tensor) -> None:
        """Keep ``tokens`` with kv [layers, 2, kv_heads, tokens, head_dim]; only what is new is copied."""
        node, position = self._root, 0
        for segment, shared in list(self._walk(tokens)):
            node = self._split(segment, shared) if shared < len(segment.tokens) else segment
            position += shared
        if position == len(tokens):
            return
        leaf = Segment(tokens[position:], kv[:, :, :, position:].clone(), node)
        leaf.used = next(self._clock)
        node.children[leaf.tokens[0]] = leaf
        self.bytes += leaf.bytes
        self._evict(leaf)

    def _split(self, segment: Segment, at: int) -> Segment:
        """Cut an edge in two; both halves own their memory, so that evicting one frees it."""
        assert segment.kv is not None and segment.parent is not None
        head = Segment(segment.tokens[:at], segment.kv[:, :, :, :at].clone(), segment.parent)
        head.used = segment.used
        segment.parent.children[head.tokens[0]] = head
        segment.tokens, segment.kv, segment.parent = segment.tokens[at:], segment.kv[:, :, :, at:].clone(), head
        head.children[segment.tokens[0]] = segment
        return head

    def _evict(self, keep: Segment) -> None:
        while self.bytes > self.budget:
            leaves = [s for s in self._segments(self._root) if not s.children and s is not keep]
            if not leaves:
                return
            oldest = min(leaves, key=lambda segment: segment.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens[0]]
            self.bytes -= oldest.bytes
            self.evicted_tokens += len(oldest.tokens)

    def _segments(self, node: Segment) -> Iterator[Segment]:
        for child in node.children.values():
            yield child
            yield from self._segments(child)
