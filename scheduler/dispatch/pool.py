"""Workers of one service by their load, and its waiting calls by their order: each change costs the
same however many there are. Workers of one load are in a stack, whose entries are stale once their
load has changed; a worker that may not be used is dropped, and entered again by ``touch``."""

import bisect
import operator
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from coppice.scheduler.dispatch.calls import Pending, Worker
from coppice.scheduler.dispatch.placement import Load

FEW = 8
"""A call that chooses for itself chooses among all workers if they are no more than this."""
LOOKED_AT = 4
"""Of more workers it is shown so many, half of them the least loaded and half in turn. A call that
asks for certain ones sees these instead of those in turn."""
_SLACK = 64
_BY_ORDER = operator.attrgetter("order")


class Pool:
    """The admitted workers of a service. ``touch`` follows every change of load or state."""

    def __init__(self) -> None:
        self.members: dict[str, Worker] = {}
        self._stacks: dict[float, deque[Worker]] = {}
        self._shares: list[float] = []  # the keys of the stacks, ascending
        self._entries = 0
        self._ring: list[Worker] = []
        self._turn = 0

    def add(self, worker: Worker) -> None:
        """A worker was admitted. It may have named the service twice."""
        if self.members.get(worker.name) is worker:
            return
        self.members[worker.name] = worker
        self._ring.append(worker)
        if worker.has_room:
            # so that of several new ones the oldest is the first
            self._stack(worker.share).appendleft(worker)

    def discard(self, worker: Worker) -> None:
        """A worker is gone."""
        if self.members.get(worker.name) is worker:
            del self.members[worker.name]
            self._ring.remove(worker)

    def touch(self, worker: Worker) -> None:
        """Note the worker's load, as one of its services does after a change."""
        if worker.has_room and self.members.get(worker.name) is worker:
            self._stack(worker.share).append(worker)
            if self._entries > _SLACK + 4 * len(self.members):
                self._sort_anew()

    def least(self, now: float, avoid: Collection[str] = ()) -> Worker | None:
        """The least loaded worker with room, of several the one that changed last, or None. avoid:
        taken only if there is no other at all, not even one without room."""
        if not avoid:
            while self._shares:
                if (worker := self._top(self._shares[0], now)) is not None:
                    return worker
            return None
        first = next((w for w in self._by_load(now) if w.name not in avoid), None)
        if first is not None or any(w.usable(now) for w in self._ring if w.name not in avoid):
            return first
        return next(self._by_load(now), None)

    def loads(self, now: float, homes: Collection[str], avoid: Collection[str]) -> list[Load]:
        """The workers that a call may choose from, as they joined: all usable ones if few, or its
        ``homes`` and the least loaded, without homes also some in turn. Of many, those to
        ``avoid`` are left out unless they are homes."""
        if len(self.members) <= FEW:
            return [_load(w) for w in self._ring if w.usable(now)]
        found = {
            w.name: w
            for w in (self.members.get(name) for name in homes)
            if w is not None and w.usable(now)
        }
        for worker in self._by_load(now):
            if len(found) >= len(homes) + LOOKED_AT // 2:
                break
            if worker.name not in avoid:
                found[worker.name] = worker
        for _ in range(0 if homes else LOOKED_AT // 2):
            self._turn = (self._turn + 1) % len(self._ring)
            if (worker := self._ring[self._turn]).usable(now) and worker.name not in avoid:
                found[worker.name] = worker
        return [_load(w) for w in sorted(found.values(), key=operator.attrgetter("joined"))]

    def _stack(self, share: float) -> deque[Worker]:
        self._entries += 1
        if (stack := self._stacks.get(share)) is None:
            bisect.insort(self._shares, share)
            stack = self._stacks[share] = deque()
        return stack

    def _sort_anew(self) -> None:
        """Drop the stale entries of all stacks."""
        self._stacks, self._shares, self._entries = {}, [], 0
        for worker in reversed(self._ring):
            if worker.has_room:
                self._stack(worker.share).append(worker)

    def _current(self, worker: Worker, share: float, now: float) -> bool:
        return (
            worker.share == share and self.members.get(worker.name) is worker and worker.usable(now)
        )

    def _top(self, share: float, now: float) -> Worker | None:
        """The worker that came last into a stack, whose stale entries are dropped."""
        stack = self._stacks[share]
        while stack:
            if self._current(worker := stack[-1], share, now):
                return worker
            stack.pop().left_out = True
            self._entries -= 1
        del self._stacks[share]
        self._shares.remove(share)
        return None

    def _by_load(self, now: float) -> Iterator[Worker]:
        """The usable workers with room, the least loaded first. Nothing may change meanwhile."""
        for share in self._shares.copy():
            if self._top(share, now) is not None:
                seen = set[Worker]()
                for worker in reversed(self._stacks[share]):
                    if worker not in seen and self._current(worker, share, now):
                        seen.add(worker)
                        yield worker


def _load(worker: Worker) -> Load:
    return Load(worker.name, len(worker.in_flight), worker.hello.capacity, worker.stats)


class WaitingCalls:
    """Waiting calls of a service by ``order``. A change near an end moves few others."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._first = 0  # before it are empty places

    def __len__(self) -> int:
        return len(self._calls) - self._first

    def __getitem__(self, at: int) -> Pending:
        return self._calls[self._first + at]

    def add(self, pending: Pending) -> None:
        """Insert a call behind those of the same order."""
        calls, first, order = self._calls, self._first, pending.order
        if first == len(calls) or calls[-1].order <= order:
            calls.append(pending)
            return
        reach = 1  # those that stand far from both ends are not in the processor's cache
        while first + reach < len(calls) and calls[first + reach].order <= order:
            reach *= 2
        at = bisect.bisect_right(
            calls, order, first + reach // 2, min(first + reach, len(calls)), key=_BY_ORDER
        )
        if at - first > len(self) // 2:
            calls.insert(at, pending)
            return
        if not first:
            first = _SLACK + len(self) // 8
            calls[:0] = [None] * first
            at += first
        calls[first - 1 : at] = [*calls[first:at], pending]
        self._first = first - 1

    def take(self, at: int) -> Pending:
        """Remove the call at a place and return it."""
        if at > len(self) // 2:
            return self._calls.pop(self._first + at)
        calls, first = self._calls, self._first
        pending = calls[first + at]
        if at:
            calls[first + 1 : first + at + 1] = calls[first : first + at]
        calls[first] = None
        self._first += 1
        if self._first > _SLACK and 2 * self._first > len(calls):
            del calls[: self._first]
            self._first = 0
        return pending

    def forget(self, pending: Pending) -> None:
        """Remove a call if it waits here."""
        at = bisect.bisect_left(self._calls, pending.order, lo=self._first, key=_BY_ORDER)
        if at < len(self._calls) and self._calls[at] is pending:
            self.take(at - self._first)
