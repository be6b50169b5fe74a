"""Where a call runs when nothing is known but load, and what the dispatcher asks of those who know more.

Pure decisions with an injected clock; the dispatcher does the I/O.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    """A worker as placement sees it. stats: its counters and gauges, of its last heartbeat."""

    worker: str
    in_flight: int
    capacity: int
    stats: Mapping[str, float] = {}

    @property
    def share(self) -> float:
        """Used part of the capacity; above 1 when pinned calls came on top."""
        return self.in_flight / self.capacity


def roomy(loads: Sequence[Load], avoid: frozenset[str] = frozenset()) -> list[Load]:
    """The workers that have room for a call.

    ``avoid`` holds workers that failed this call: they are used only when no other worker exists at all, because one that fails
    fast always has room and would swallow every attempt.
    """
    candidates = [load for load in loads if load.worker not in avoid] or loads
    return [load for load in candidates if load.in_flight < load.capacity]


def choose(loads: Sequence[Load], avoid: frozenset[str] = frozenset()) -> str | None:
    """The least loaded worker, or None when all are full."""
    free = roomy(loads, avoid)
    return min(free, key=lambda load: load.share).worker if free else None


class Place:
    """What one call asks of the dispatcher, and learns from it; this one takes its turn on the least loaded worker.

    ``started`` and ``ended`` come in pairs, one for each attempt.
    """

    def rank(self) -> tuple[Any, ...]:
        """Calls of one service that wait are tried in the order of their ranks, equal ones in the order they came; may change."""
        return ()

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        """The worker to run on now, or None to wait. loads: the usable workers; avoid: see ``roomy``.

        Who waits though there is room is asked again when a call ends or a heartbeat comes, and soon after.
        """
        return choose(loads, avoid)

    def started(self, worker: str) -> None:
        """An attempt was sent to ``worker``."""

    def ended(self, worker: str, result: Any | None) -> None:
        """The attempt is over; result is None when it failed, was cancelled, or came too late."""


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


def backoff(attempt: int, rng: random.Random, base_s: float = 0.05, most_s: float = 5.0) -> float:
    """Seconds to wait before attempt ``attempt`` + 1: exponential, with jitter over its upper half."""
    ceiling = min(most_s, base_s * 2 ** min(attempt, 30))
    return ceiling * (0.5 + 0.5 * rng.random())
