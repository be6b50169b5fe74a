"""A radix tree of token sequences, as the bytes of int32, under a budget.

Invariant: in the order of eviction every edge precedes its parent, so the first is always a leaf.
"""

import math
from collections import OrderedDict
from typing import Any

import numpy as np

WIDTH = 4
"""Bytes per token id."""


class Edge:
    """A run of tokens below ``parent``. size: the bytes that count."""

    __slots__ = ("children", "parent", "tokens")

    def __init__(self, tokens: bytes, parent: "Edge | None"):
        self.tokens, self.parent = tokens, parent
        self.children: dict[bytes, Any] = {}
        if parent is not None:
            parent.children[tokens[:WIDTH]] = self

    @property
    def size(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> Any:
        """Cut the edge after ``at`` tokens. Returns the new upper half."""
        head = type(self)(self.tokens[: at * WIDTH], self.parent)
        self.tokens, self.parent = self.tokens[at * WIDTH :], head
        head.children[self.tokens[:WIDTH]] = self
        return head


def common_length(a: bytes, b: bytes) -> int:
    """Return the number of tokens in the common prefix of ``a`` and ``b``."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest // WIDTH
    differ = np.frombuffer(a[:shortest], np.int32) != np.frombuffer(b[:shortest], np.int32)
    return int(np.argmax(differ))


class RadixTree:
    """Edges of at most ``budget`` bytes. bytes: of all edges."""

    edge: type[Edge] = Edge

    def __init__(self, budget: float = math.inf):
        self.budget, self.evicted_tokens, self._order = budget, 0, OrderedDict[Any, None]()
        self.clear()

    def clear(self) -> None:
        """Forget everything. This does not count as eviction."""
        for edge in self._order:
            edge.parent = None  # or they would hold each other until a garbage collection
        self.bytes, self._root, self._order = 0, self.edge(b"", None), OrderedDict[Any, None]()

    def limit(self, budget: float) -> None:
        """Bound the tree to ``budget`` bytes: evict the least recently used leaves."""
        self.budget = budget
        while self.bytes > budget and self._order:
            oldest, _ = self._order.popitem(last=False)
            assert oldest.parent is not None and not oldest.children
            del oldest.parent.children[oldest.tokens[:WIDTH]]
            self.bytes -= oldest.size
            self.evicted_tokens += len(oldest.tokens) // WIDTH

    def _walk(self, tokens: bytes) -> tuple[list[Any], int, int]:
        """Return the longest held prefix's edges, its length, and that in the last one."""
        path, node, at, shared = list[Any](), self._root, 0, 0
        while (below := node.children.get(tokens[at : at + WIDTH])) is not None:
            shared = common_length(below.tokens, tokens[at : at + len(below.tokens)])
            path.append(below)
            at += shared * WIDTH
            if shared * WIDTH < len(below.tokens):
                break
            node = below
        return path, at // WIDTH, shared

    def _touch(self, path: list[Any]) -> None:
        for edge in reversed(path):
            self._order.setdefault(edge)
            self._order.move_to_end(edge)
