"""The choice of a worker by load alone, and ``Place``, through which a call that knows more makes
the choice itself. Pure decisions: the dispatcher does the I/O."""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    """A worker as placement sees it. stats: the counters and gauges of its last heartbeat."""

    worker: str
    in_flight: int
    capacity: int
    stats: Mapping[str, float] = {}

    @property
    def share(self) -> float:
        """The used share of the capacity; above 1 when pinned calls were added to a full worker."""
        return self.in_flight / self.capacity


def roomy(loads: Sequence[Load], avoid: frozenset[str] = frozenset()) -> list[Load]:
    """The workers with room. Those to ``avoid``, which failed this call, are used only if there is
    no other at all: a worker that fails fast always has room and would swallow every attempt."""
    candidates = [load for load in loads if load.worker not in avoid] or loads
    return [load for load in candidates if load.in_flight < load.capacity]


def choose(loads: Sequence[Load], avoid: frozenset[str] = frozenset()) -> str | None:
    """The least loaded worker, or None when all are full."""
    free = roomy(loads, avoid)
    return min(free, key=lambda load: load.share).worker if free else None


class Place:
    """How one call is ordered and placed: here first in, first out for the least loaded worker.
    ``rank`` and ``choose`` are asked while it waits, ``started`` and ``ended`` once per attempt."""

    def rank(self) -> tuple[Any, ...]:
        """The sorting key among waiting calls; equal ranks keep their order. It may change."""
        return ()

    def waits_with(self) -> Any:
        """What it shares with calls behind it that wait if this one must; None: they may start."""
        return None

    def homes(self) -> Collection[str]:
        """The workers that it prefers, which it is shown also in a large fleet."""
        return ()

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        """The worker to run on now, or None to wait until a call ends or a heartbeat comes. loads:
        the usable workers, or some of many (``scheduler.pool``); avoid: see ``roomy``."""
        return choose(loads, avoid)

    def started(self, worker: str) -> None:
        """An attempt was sent to ``worker``."""

    def ended(self, worker: str, result: Any | None) -> None:
        """The attempt has ended. result: None unless it was served."""


class Breaker:
    """Keeps calls away from a worker for ``rest_s`` seconds after ``threshold`` failures in a row:
    closed -> open -> (rest_s passes) -> closed, where a single failure opens it again."""

    def __init__(self, threshold: int = 5, rest_s: float = 10.0):
        self.threshold, self.rest_s = threshold, rest_s
        self.failures = 0
        self.open_until = float("-inf")

    def record(self, ok: bool, now: float) -> None:
        """Record whether one call succeeded."""
        self.failures = 0 if ok else self.failures + 1
        if self.failures >= self.threshold:
            self.open_until = now + self.rest_s
            self.failures = self.threshold - 1

    def closed(self, now: float) -> bool:
        """May this worker be used now?"""
        return now >= self.open_until


def backoff(attempt: int, rng: random.Random, base_s: float = 0.05, most_s: float = 5.0) -> float:
    """Seconds before the next attempt: exponential, the upper half drawn at random."""
    ceiling = min(most_s, base_s * 2 ** min(attempt, 30))
    return ceiling * (0.5 + 0.5 * rng.random())
