"""What each actor's prefix cache probably holds: a radix tree of token ids per worker, which
forgets its least recently used leaves beyond the capacity, and everything at a new version."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

_WIDTH = 4
"""Bytes per token id: prefixes are compared as the bytes of int32."""


class Edge:
    """A run of tokens below ``parent``, as bytes. used: when a call last passed here."""

    __slots__ = ("alive", "children", "parent", "tokens", "used")

    def __init__(self, tokens: bytes, parent: "Edge | None", used: int):
        self.tokens, self.parent, self.used = tokens, parent, used
        self.children: dict[bytes, Edge] = {}
        self.alive = True


def common(a: bytes, b: bytes) -> int:
    """The number of tokens in the common prefix of ``a`` and ``b``."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest // _WIDTH
    differ = np.frombuffer(a[:shortest], np.int32) != np.frombuffer(b[:shortest], np.int32)
    return int(np.argmax(differ))


class Prefixes:
    """The prefixes that one cache holds. capacity: in tokens; infinite while it is unknown."""

    def __init__(self, capacity: float = math.inf):
        self.capacity = capacity
        self.tokens = 0
        self._root = Edge(b"", None, 0)
        self._clock = itertools.count(1)
        # a heap; the entries of edges used again are stale
        self._leaves: list[tuple[int, int, Edge]] = []

    def match(self, tokens: bytes) -> int:
        """The length in tokens of the longest held prefix of ``tokens``, which counts as no use."""
        return sum(shared for _, shared in self._walk(tokens))

    def insert(self, tokens: bytes) -> int:
        """Hold ``tokens`` as just used. Returns the tokens of it that were held before."""
        now, edge, held = next(self._clock), self._root, 0
        for below, shared in list(self._walk(tokens)):
            edge = below if shared * _WIDTH == len(below.tokens) else self._split(below, shared)
            edge.used = now
            held += shared
        rest = tokens[held * _WIDTH :]
        if rest:
            edge.children[rest[:_WIDTH]] = leaf = Edge(rest, edge, now)
            self.tokens += len(rest) // _WIDTH
            edge = leaf
        self._note(edge)
        self.shrink()
        return held

    def shrink(self) -> None:
        """Forget the least recently used leaves until the tokens are within the capacity."""
        while self.tokens > self.capacity and self._leaves:
            used, _, edge = heapq.heappop(self._leaves)
            if not edge.alive or edge.children or edge.used != used or edge.parent is None:
                continue
            edge.alive = False
            self.tokens -= len(edge.tokens) // _WIDTH
            del edge.parent.children[edge.tokens[:_WIDTH]]
            self._note(edge.parent)

    def _walk(self, tokens: bytes) -> Iterator[tuple[Edge, int]]:
        """The edges along ``tokens``, each with the number of its tokens that match."""
        edge, position = self._root, 0
        while (below := edge.children.get(tokens[position : position + _WIDTH])) is not None:
            shared = common(below.tokens, tokens[position : position + len(below.tokens)])
            yield below, shared
            if shared * _WIDTH < len(below.tokens):
                return
            edge, position = below, position + len(below.tokens)

    def _split(self, edge: Edge, at: int) -> Edge:
        """Cut an edge after ``at`` tokens. Returns the new upper half."""
        assert edge.parent is not None
        head = Edge(edge.tokens[: at * _WIDTH], edge.parent, edge.used)
        edge.parent.children[head.tokens[:_WIDTH]] = head
        edge.tokens, edge.parent = edge.tokens[at * _WIDTH :], head
        head.children[edge.tokens[:_WIDTH]] = edge
        return head

    def _note(self, edge: Edge) -> None:
        if edge.parent is not None and not edge.children:
            heapq.heappush(self._leaves, (edge.used, next(self._clock), edge))


class Residency:
    """The caches of all workers."""

    def __init__(self) -> None:
        self._prompt = self._predicted = self._reported = 0
        self._caches: defaultdict[str, Prefixes] = defaultdict(Prefixes)
        self._versions: dict[str, int] = {}

    def limit(self, worker: str, capacity: float) -> None:
        """Set the capacity of the worker's cache in tokens."""
        cache = self._caches[worker]
        if cache.capacity != capacity:
            cache.capacity = capacity
            cache.shrink()

    def capacity(self, worker: str) -> float:
        """The capacity of the worker's cache in tokens; infinite while it is unknown."""
        return self._caches[worker].capacity

    def expect(self, worker: str, tokens: bytes) -> int:
        """How many prompt tokens should be cached; never the last, whose logits are needed."""
        return min(self._caches[worker].match(tokens), len(tokens) // _WIDTH - 1)

    def started(self, worker: str, tokens: bytes) -> int:
        """A call was sent: count its prompt as resident. Returns what ``expect`` said before."""
        return min(self._caches[worker].insert(tokens), len(tokens) // _WIDTH - 1)

    def sampled(self, worker: str, tokens: bytes, version: int) -> None:
        """A prompt with its continuation is resident, unless older weights began the sample."""
        if version > self._versions.get(worker, version):
            self.emptied(worker, version)
        if version == self._versions.setdefault(worker, version):
            self._caches[worker].insert(tokens)

    def emptied(self, worker: str, version: int) -> None:
        """The worker loaded weights of ``version``, so its cache is empty."""
        self._caches[worker] = Prefixes(self._caches[worker].capacity)
        self._versions[worker] = version

    def forget(self, worker: str) -> None:
        self._caches.pop(worker, None)
        self._versions.pop(worker, None)

    def compare(self, prompt: int, predicted: int, reported: int) -> None:
        """A call was served: count its prompt tokens, those predicted as cached, and reported."""
        self._prompt += prompt
        self._predicted += predicted
        self._reported += reported

    def take(self) -> dict[str, float]:
        """Return the metrics since the last ``take``, none if no call was served."""
        prompt, predicted, reported = self._prompt, self._predicted, self._reported
        self._prompt = self._predicted = self._reported = 0
        if not prompt:
            return {}
        return {
            "cache/prompt_tokens": float(prompt),
            "cache/hit_rate": reported / prompt,
            "cache/predicted_hit_rate": predicted / prompt,
            "cache/prediction_error": (predicted - reported) / prompt,
        }
