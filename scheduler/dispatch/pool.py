"""The workers of one service by their load, at the same cost of a change for any number."""

import heapq
import itertools
import operator
from collections.abc import Collection

from coppice.scheduler.dispatch.calls import Worker

FEW = 8
"""A call that chooses for itself chooses among all workers if they are no more than this."""
LOOKED_AT = 4
"""In a larger fleet a call sees four candidates: the two least loaded, and two in turn or those
that it asks for."""
_SLACK = 64


class Pool:
    """The admitted workers of a service. ``touch`` follows every change of load or state. An entry
    (share, order, worker) of the heap is stale once the load has changed, and is dropped on top."""

    def __init__(self) -> None:
        self.members: dict[str, Worker] = {}
        self._heap: list[tuple[float, int, Worker]] = []
        self._stamps = itertools.count(1)
        self._ring: list[Worker] = []
        self._turn = 0

    def add(self, worker: Worker) -> None:
        """A worker was admitted. It may have named the service twice."""
        if self.members.get(worker.name) is not worker:
            self.members[worker.name] = worker
            self._ring.append(worker)
            self._push(worker, next(self._stamps))  # of several new ones the oldest is the first

    def discard(self, worker: Worker) -> None:
        if self.members.get(worker.name) is worker:
            del self.members[worker.name]
            self._ring.remove(worker)

    def touch(self, worker: Worker) -> None:
        """Note the worker's load, as one of its services does after a change."""
        if self.members.get(worker.name) is worker:
            self._push(worker, -next(self._stamps))
            if len(self._heap) > _SLACK + 4 * len(self.members):
                self._heap = []
                for member in self._ring:
                    self._push(member, next(self._stamps))

    def least(self, now: float, avoid: Collection[str] = ()) -> Worker | None:
        """The least loaded worker with room, of several the one that changed last, or None. avoid:
        taken only if there is no other at all, not even one without room."""
        if not avoid or not any(w.usable(now) for w in self._ring if w.name not in avoid):
            return self._top(now)
        return next(iter(self._first(1, now, avoid)), None)

    def shown(self, now: float, homes: Collection[str], avoid: Collection[str]) -> list[Worker]:
        """The workers that a call may choose from, as they joined: all usable ones if few, or its
        ``homes`` and the least loaded, without homes also some in turn. Of many, those to
        ``avoid`` are left out unless they are homes."""
        if len(self.members) <= FEW:
            return [worker for worker in self._ring if worker.usable(now)]
        some = [self.members[name] for name in homes if name in self.members]
        for _ in range(0 if homes else LOOKED_AT // 2):
            self._turn = (self._turn + 1) % len(self._ring)
            some += [w for w in (self._ring[self._turn],) if w.name not in avoid]
        found = {worker.name: worker for worker in some if worker.usable(now)}
        found |= {w.name: w for w in self._first(LOOKED_AT // 2, now, {*avoid, *homes})}
        return sorted(found.values(), key=operator.attrgetter("joined"))

    def _push(self, worker: Worker, order: int) -> None:
        if worker.has_room:
            heapq.heappush(self._heap, (worker.share, order, worker))

    def _top(self, now: float) -> Worker | None:
        while self._heap:
            share, _, worker = self._heap[0]
            here = self.members.get(worker.name) is worker
            if here and worker.share == share and worker.usable(now):
                return worker
            heapq.heappop(self._heap)
            worker.left_out = True
        return None

    def _first(self, count: int, now: float, avoid: Collection[str]) -> list[Worker]:
        """The ``count`` least loaded usable workers with room that are not in ``avoid``."""
        found: list[Worker] = []
        taken = []
        while len(found) < count and (worker := self._top(now)) is not None:
            taken.append(heapq.heappop(self._heap))
            if worker.name not in avoid and worker not in found:
                found.append(worker)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return found
