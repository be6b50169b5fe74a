"""The pool against the plain definition, which looks at every worker."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from coppice.scheduler.dispatch.calls import Place, Worker
from coppice.scheduler.dispatch.pool import FEW, LOOKED_AT, Pool
from coppice.wire.messages import Register


class Fleet:
    """A pool and its workers, which change at random. now: the clock of the breakers."""

    def __init__(self, rng: random.Random):
        self.rng, self.pool, self.now = rng, Pool(), 0.0
        self.workers: list[Worker] = []
        self.names = iter(range(10_000))

    def join(self) -> None:
        hello = Register(f"w{next(self.names)}", ["s"], self.rng.randint(1, 4), 1, "here")
        worker = Worker(hello.worker.encode(), hello, self.now, "")
        worker.ready, worker.joined = True, int(hello.worker[1:])
        self.workers.append(worker)
        self.pool.add(worker)

    def change(self) -> None:
        """Do one thing that the dispatcher does."""
        if len(self.workers) < 2 or self.rng.random() < 0.1:
            return self.join()
        worker = self.rng.choice(self.workers)
        what = self.rng.randrange(7)
        if what < 3:
            attempt: Any = None
            worker.in_flight[self.rng.getrandbits(60)] = attempt
        elif what < 5 and worker.in_flight:
            del worker.in_flight[next(iter(worker.in_flight))]
        elif what == 5 and self.rng.random() < 0.3:
            worker.draining = True
        elif what == 6 and self.rng.random() < 0.2:
            self.workers.remove(worker)
            worker.ready = False
            return self.pool.discard(worker)
        elif self.rng.random() < 0.3:
            worker.breaker.open_until = self.now + 5
        self.pool.touch(worker)
        return None

    def beat(self) -> None:
        """Every worker sends a heartbeat."""
        self.now += 1
        for worker in self.workers:
            if worker.left_out:
                self.pool.touch(worker)

    def usable(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.usable(self.now)]


def after_each_change(seed: int) -> Iterator[Fleet]:
    """One fleet after each of 300 changes, with a heartbeat before it is looked at."""
    fleet = Fleet(random.Random(seed))
    for _ in range(300):
        fleet.change()
        fleet.beat()
        yield fleet


@pytest.mark.parametrize("seed", range(20))
def test_the_least_loaded_worker_is_found_as_if_all_were_looked_at(seed: int) -> None:
    for fleet in after_each_change(seed):
        avoid = frozenset(w.name for w in fleet.workers if fleet.rng.random() < 0.3)
        for names in (frozenset[str](), avoid, frozenset(w.name for w in fleet.workers)):
            found = fleet.pool.least(fleet.now, names)
            expected = Place().choose(fleet.usable(), names)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found.share == expected.share
                assert (found.name in names) == (expected.name in names)


@pytest.mark.parametrize("seed", range(20))
def test_a_call_sees_all_of_few_workers_and_some_of_many(seed: int) -> None:
    sizes = set[bool]()
    for fleet in after_each_change(seed):
        usable, homes = fleet.usable(), [w.name for w in fleet.rng.sample(fleet.workers, 1)]
        shown = fleet.pool.shown(fleet.now, homes, frozenset())
        few = len(fleet.workers) <= FEW
        sizes.add(few)
        if few:
            assert shown == usable
            continue
        assert {w for w in usable if w.name in homes} <= {*shown} <= {*usable}
        assert len(shown) <= LOOKED_AT + len(homes)
        least = Place().choose(usable, frozenset())
        assert least is None or least.share in {worker.share for worker in shown}
    assert sizes == {True, False}
