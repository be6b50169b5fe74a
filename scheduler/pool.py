"""The workers of one service by their load, and its waiting calls by their order: each change costs the same however many there are.

A worker is found by a heap whose entries are stale once its load has changed. A worker that may not be used is left out when it comes
up, and entered again by ``touch`` when something about it changes: when its rest ends, or with its next heartbeat.
"""

import bisect
import heapq
import operator
from collections.abc import Collection, Iterator
from typing import Any

from scheduler.calls import Pending, Worker
from scheduler.placement import Load

FEW = 8
"""A call that chooses for itself chooses among all workers if they are no more than this."""
LOOKED_AT = 4
"""Of more workers it is shown so many, half of them the least loaded and half in turn, besides those that it asks for."""
_SLACK = 64
_BY_ORDER = operator.attrgetter("order")


class Pool:
    """The workers that offer one service and were admitted. ``touch`` must be called after every change of a worker's load or state."""

    def __init__(self) -> None:
        self.members: dict[str, Worker] = {}
        self._heap: list[tuple[float, int, int, Worker]] = []
        self._ring: list[Worker] = []
        self._turn = 0

    def add(self, worker: Worker) -> None:
        """A worker was admitted. It may have named the service twice."""
        if self.members.get(worker.name) is worker:
            return
        self.members[worker.name] = worker
        self._ring.append(worker)
        self.touch(worker)

    def discard(self, worker: Worker) -> None:
        """A worker is gone."""
        if self.members.get(worker.name) is worker:
            del self.members[worker.name]
            self._ring.remove(worker)

    def touch(self, worker: Worker) -> None:
        """Note the worker's load, as one of its services does after a change."""
        if worker.has_room and self.members.get(worker.name) is worker:
            heapq.heappush(self._heap, (worker.share, worker.joined, worker.changes, worker))
            if len(self._heap) > _SLACK + 4 * len(self.members):
                self._heap = [(w.share, w.joined, w.changes, w) for w in self._ring if w.has_room]
                heapq.heapify(self._heap)

    def has_room(self, now: float) -> bool:
        """Whether a usable worker has room."""
        heap = self._heap
        while heap:
            _, _, changes, worker = heap[0]
            if changes == worker.changes and worker.usable(now):
                return True
            heapq.heappop(heap)
        return False

    def least(self, now: float, avoid: Collection[str] = ()) -> Worker | None:
        """The least loaded worker with room, the oldest of several; None if there is none. avoid: workers that are taken only if there is no
        other at all, not even one without room."""
        if not avoid:
            return self._heap[0][3] if self.has_room(now) else None
        first = next((w for w in self._by_load(now) if w.name not in avoid), None)
        if first is not None or any(w.usable(now) for w in self._ring if w.name not in avoid):
            return first
        return next(self._by_load(now), None)

    def loads(self, now: float, homes: Collection[str], avoid: Collection[str]) -> list[Load]:
        """The workers that a call may choose from, in the order in which they joined: all usable ones if they are few, or else those with
        room among its ``homes`` and ``LOOKED_AT`` others, and those to ``avoid`` only if there is no other."""
        if len(self.members) <= FEW:
            return [_load(w) for w in self._ring if w.usable(now)]
        found = {w.name: w for w in (self.members.get(name) for name in homes) if w is not None and w.usable(now)}
        for worker in self._by_load(now):
            if len(found) >= len(homes) + LOOKED_AT // 2:
                break
            if worker.name not in avoid:
                found[worker.name] = worker
        for _ in range(LOOKED_AT // 2):
            self._turn = (self._turn + 1) % len(self._ring)
            if (worker := self._ring[self._turn]).usable(now) and worker.name not in avoid:
                found[worker.name] = worker
        return [_load(w) for w in sorted(found.values(), key=operator.attrgetter("joined"))]

    def _by_load(self, now: float) -> Iterator[Worker]:
        """The usable workers with room, the least loaded first. Nothing may change while they are read."""
        taken = list[tuple[float, int, int, Worker]]()
        try:
            while self.has_room(now):
                taken.append(heapq.heappop(self._heap))
                yield taken[-1][3]
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)


def _load(worker: Worker) -> Load:
    return Load(worker.name, len(worker.in_flight), worker.hello.capacity, worker.stats)


class Queue:
    """The waiting calls of one service, ascending by ``order``. Taking the first and adding a last one do not move the others."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._first = 0  # before it are empty places

    def __len__(self) -> int:
        return len(self._calls) - self._first

    def __getitem__(self, at: int) -> Pending:
        return self._calls[self._first + at]

    def add(self, pending: Pending) -> None:
        """Insert a call behind those of the same order."""
        bisect.insort(self._calls, pending, lo=self._first, key=_BY_ORDER)

    def take(self, at: int) -> Pending:
        """Remove the call at a place and return it."""
        if at:
            return self._calls.pop(self._first + at)
        pending, self._calls[self._first] = self._calls[self._first], None
        self._first += 1
        if self._first > _SLACK and 2 * self._first > len(self._calls):
            del self._calls[: self._first]
            self._first = 0
        return pending

    def forget(self, pending: Pending) -> None:
        """Remove a call if it waits here."""
        at = bisect.bisect_left(self._calls, pending.order, lo=self._first, key=_BY_ORDER)
        if at < len(self._calls) and self._calls[at] is pending:
            self.take(at - self._first)
