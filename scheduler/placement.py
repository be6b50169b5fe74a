"""Which worker gets a call: the one that holds its prefix unless that one is overloaded, else the least loaded.

Pure decisions with an injected clock; the dispatcher does the I/O.
"""

import random
from collections import deque
from collections.abc import Iterable

import msgspec

AFFINITY_SLACK = 0.5
"""A preferred worker may be fuller than the least loaded one by this share of its capacity before affinity is given up:
a prefix costs one prefill elsewhere, a queue costs every request behind it."""


class Load(msgspec.Struct, frozen=True):
    """A worker as placement sees it."""

    worker: str
    in_flight: int
    capacity: int

    @property
    def share(self) -> float:
        """Used part of the capacity; above 1 when pinned calls came on top."""
        return self.in_flight / self.capacity


def choose(loads: Iterable[Load], prefer: str | None = None, avoid: frozenset[str] = frozenset()) -> str | None:
    """The worker for one call, or None when all are full.

    ``avoid`` holds workers that failed this call: they are used only when no other worker exists at all, because one that fails
    fast always has room and would swallow every attempt.
    """
    known = list(loads)
    candidates = [load for load in known if load.worker not in avoid] or known
    free = [load for load in candidates if load.in_flight < load.capacity]
    if not free:
        return None
    least = min(free, key=lambda load: load.share)
    for load in free:
        if load.worker == prefer and load.share <= least.share + AFFINITY_SLACK:
            return load.worker
    return least.worker


class Breaker:
    """Rests a worker that failed ``threshold`` calls in a row for ``rest_s`` seconds.

    States: closed -> (threshold failures) -> open -> (rest_s passes) -> closed with one failure left.
    """

    def __init__(self, threshold: int = 5, rest_s: float = 10.0):
        self.threshold, self.rest_s = threshold, rest_s
        self.failures = 0
        self.open_until = float("-inf")

    def record(self, ok: bool, now: float) -> None:
        """Note the outcome of one call."""
        self.failures = 0 if ok else self.failures + 1
        if self.failures >= self.threshold:
            self.open_until = now + self.rest_s
            self.failures = self.threshold - 1

    def closed(self, now: float) -> bool:
        """May this worker be used now?"""
        return now >= self.open_until


class Latencies:
    """The latest latencies of one service, for hedging."""

    def __init__(self, kept: int = 256, fewest: int = 20):
        self.fewest = fewest
        self._latest: deque[float] = deque(maxlen=kept)

    def record(self, seconds: float) -> None:
        """Note how long a served call took."""
        self._latest.append(seconds)

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of the latest calls stayed within; None while fewer than ``fewest`` are known."""
        if len(self._latest) < self.fewest:
            return None
        ordered = sorted(self._latest)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def backoff(attempt: int, rng: random.Random, base_s: float = 0.05, most_s: float = 5.0) -> float:
    """Seconds to wait before attempt ``attempt`` + 1: exponential, with jitter over its upper half."""
    ceiling = min(most_s, base_s * 2 ** min(attempt, 30))
    return ceiling * (0.5 + 0.5 * rng.random())
