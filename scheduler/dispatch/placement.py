"""Which actor generates for which tree, and when (docs/placement.md). A tree begins on the least
crowded actor and goes on where most of its prefix is. A call waits while older trees leave its tree
no cache room. The oldest tree never waits, and an actor that has decoded less than a batch for
``PATIENCE_S`` takes a call anyway, so no call waits forever. Pure but for the clock."""

import bisect
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from coppice.scheduler.dispatch.calls import Place, Worker, roomy
from coppice.scheduler.dispatch.pool import FEW, LOOKED_AT
from coppice.scheduler.dispatch.residency import Residency
from coppice.wire.messages import GenerateRequest, GenerateResult

AFFINITY_SLACK = 0.5
"""Affinity is given up when the holder of a prefix is fuller than the least loaded actor by more
than this share of its capacity: a prefill costs less than a queue."""
PATIENCE_S = 0.2
"""Seconds from an answer to a tree's next call, unless a judge or a tool is slow."""
KEPT = 64
"""The number of ended trees whose mean need is the expected need of a tree."""
HOMES = 4
"""The number of actors, those where a tree was last, on which its calls look for their prefix."""
MEMORY = 0.99
"""Weight of the earlier samples in the moving mean of the length of a sample."""
SPARE = "spare"
"""The gauge in a worker's heartbeat that says that actors before it have its machine's cores."""
CAPACITY = "kv_capacity_tokens"
"""The gauge in a worker's heartbeat that says how many tokens its cache holds."""


class Seat(msgspec.Struct):
    """A tree's place in an actor's cache, in tokens beyond those shared with other trees. path: the
    longest prompt; sampling: expected tokens of calls in flight; need: the largest sum of both."""

    path: int = 0
    sampling: float = 0.0
    calls: int = 0
    need: float = 0.0


class Growing(msgspec.Struct):
    """A begun tree. shared: cached tokens of its first prompt; first: its other tokens."""

    shared: int
    first: float
    actors: list[str] = []


class Fleet:
    """The trees on all actors; tell it when one has ``ended``. steps: the turns that a tree is
    assumed to take, until ended trees show what a tree needs. batch: the samples that an actor
    decodes together; one with fewer takes trees beyond its cache's room (0: never)."""

    def __init__(
        self, steps: int = 4, batch: int = 24, clock: Callable[[], float] = time.monotonic
    ):
        self.residency = Residency()
        self.steps, self.batch, self.clock = steps, batch, clock
        self.trees: dict[int, Growing] = {}
        self.seats: dict[str, dict[int, Seat]] = {}
        self.decoding: Counter[str] = Counter()
        self.sample_length: float | None = None  # the moving mean
        self._low_since: dict[str, float] = {}
        self.sums: dict[str, tuple[list[int], list[float]]] = {}  # what ``expected`` returned
        self._needs: deque[float] = deque(maxlen=KEPT)
        self._mean: float | None = None

    def ended(self, tree: int) -> None:
        """Free a tree's room, and remember what it needed as the measure for other trees."""
        growing = self.trees.pop(tree, None)
        seats = [self.seats.get(actor, {}) for actor in growing.actors] if growing else []
        if needs := [by_tree.pop(tree).need for by_tree in seats if tree in by_tree]:
            self._needs.append(max(needs))
            self._mean = sum(self._needs) / len(self._needs)
            self.sums.clear()

    def left(self, worker: str) -> None:
        """Forget a worker that is gone, or whose name belongs to a new worker."""
        self.residency.forget(worker)
        for by_worker in (self.seats, self.sums, self.decoding, self._low_since):
            by_worker.pop(worker, None)

    def decode(self, worker: str, samples: int) -> None:
        """Add samples to those being decoded, and note since when they are fewer than a batch."""
        self.decoding[worker] += samples
        if self.decoding[worker] >= self.batch:
            self._low_since.pop(worker, None)
        else:
            self._low_since.setdefault(worker, self.clock())

    def low(self, worker: str) -> bool:
        """Whether the worker has been decoding less than a batch for at least ``PATIENCE_S``."""
        never = math.inf if worker in self.decoding else -math.inf
        return self.clock() - self._low_since.get(worker, never) >= PATIENCE_S

    def expected(self, worker: str) -> tuple[list[int], list[float]]:
        """The trees on a worker, ascending, and the tokens of the first 0, 1, 2, ... of them."""
        if worker not in self.sums:
            seats = sorted(self.seats.get(worker, {}).items())
            sizes = (self.size(self.trees[tree], seat.need) for tree, seat in seats)
            self.sums[worker] = [tree for tree, _ in seats], [0.0, *itertools.accumulate(sizes)]
        return self.sums[worker]

    def size(self, tree: Growing, need: float) -> float:
        """Tokens that a tree is expected to need in all."""
        return max(need, self.steps * tree.first if self._mean is None else self._mean)

    def crowd(self, worker: Worker) -> tuple[float, float, int]:
        """Whether a worker is spare, its load plus the taken share of its cache, its number of
        trees."""
        capacity = self.residency.capacity(worker.name)
        taken = 0.0 if math.isinf(capacity) else self.expected(worker.name)[1][-1] / capacity
        spare = worker.stats.get(SPARE, 0.0)
        return spare, worker.share + taken, len(self.seats.get(worker.name, ()))


class Generation(Place):
    """The place of one generate call of a tree. tokens: the prompt as the bytes of int32 [length].
    background: it serves no trained trajectory."""

    def __init__(self, fleet: Fleet, tree: int, request: GenerateRequest, background: bool = False):
        self.fleet, self.tree, self.request, self.background = fleet, tree, request, background
        self.tokens = request.tokens.astype(np.int32, copy=False).tobytes()
        self.length = len(request.tokens)
        # of each attempt in flight: the cached prompt tokens and the sampled ones to expect
        self._sent: dict[str, tuple[int, float]] = {}

    @property
    def begun(self) -> bool:
        """Whether a call of the tree was ever sent."""
        return self.tree in self.fleet.trees

    def rank(self) -> tuple[Any, ...]:
        """Trained trajectories, begun trees, older trees, deeper prompts; siblings together."""
        return self.background, not self.begun, self.tree, -self.length, self.tokens

    def waits_with(self) -> Any:
        """A tree that has not begun does not overtake an older one that has no cache room yet."""
        return None if self.begun else "new"

    def homes(self) -> list[str]:
        return self.fleet.trees[self.tree].actors[-HOMES:] if self.begun else []

    def choose(self, workers: Sequence[Worker], avoid: frozenset[str]) -> Worker | None:
        fleet = self.fleet
        for worker in workers:
            if (tokens := worker.stats.get(CAPACITY, 0.0)) > 0:  # 0: unknown, or none free now
                fleet.residency.limit(worker.name, tokens)
        free, tree = roomy(workers, avoid), self._growing()
        if not (fitting := [worker for worker in free if self._fits(tree, worker.name)]):
            return None
        if not self.begun:
            return min(fitting, key=fleet.crowd)
        held = {worker.name: tree.shared for worker in free}
        homes = held.keys() if len(workers) <= FEW else held.keys() & set(tree.actors)
        held |= {name: fleet.residency.expect(name, self.tokens) for name in homes}
        home = _nearest(free, held)
        best = home if home in fitting else _nearest(fitting, held)
        moved = held[best.name] < held[home.name]
        return None if moved and not fleet.low(best.name) else best

    def started(self, worker: str) -> None:
        fleet = self.fleet
        tree = fleet.trees[self.tree] = self._growing()
        for actor in tree.actors:
            seats = fleet.seats.get(actor, {})
            if actor != worker and self.tree in seats and not seats[self.tree].calls:
                del seats[self.tree]  # the tree has moved
                fleet.sums.pop(actor, None)
        tree.actors = [actor for actor in tree.actors if actor != worker] + [worker]
        sampling = self._sampling()
        self._sent[worker] = fleet.residency.started(worker, self.tokens), sampling
        seat = fleet.seats.setdefault(worker, {}).setdefault(self.tree, Seat())
        seat.calls += 1
        seat.path = max(seat.path, self.length - tree.shared)
        seat.sampling += sampling
        seat.need = max(seat.need, seat.path + seat.sampling)
        fleet.sums.pop(worker, None)
        fleet.decode(worker, self.request.n)

    def ended(self, worker: str, result: GenerateResult | None) -> None:
        fleet, (expected, sampling) = self.fleet, self._sent.pop(worker)
        if (seat := fleet.seats.get(worker, {}).get(self.tree)) is not None:
            seat.calls -= 1
            seat.sampling -= sampling
        fleet.decode(worker, -self.request.n)
        if result is None:
            return
        fleet.residency.compare(result.prompt_tokens, expected, result.cached_tokens)
        for sample in result.samples:
            if length := len(sample.tokens):
                before = fleet.sample_length or length
                fleet.sample_length = length + MEMORY * (before - length)
                tokens = self.tokens + sample.tokens[:-1].astype(np.int32, copy=False).tobytes()
                fleet.residency.sampled(worker, tokens, int(sample.versions[0]))

    def _growing(self) -> Growing:
        if tree := self.fleet.trees.get(self.tree):
            return tree
        # what trees share, such as instructions, is on any of them
        some, residency = itertools.islice(self.fleet.seats, LOOKED_AT), self.fleet.residency
        shared = max((residency.expect(worker, self.tokens) for worker in some), default=0)
        return Growing(shared, self.length - shared + self._sampling())

    def _sampling(self) -> float:
        """Tokens that the call is expected to sample, from the mean length of samples so far."""
        most, mean = self.request.sampling.max_tokens, self.fleet.sample_length
        return self.request.n * (most if mean is None else min(most, mean))

    def _fits(self, tree: Growing, worker: str) -> bool:
        """Whether older trees leave room. The oldest fits, and any if the worker is low."""
        fleet = self.fleet
        if math.isinf(capacity := fleet.residency.capacity(worker)):
            return True
        trees, sums = fleet.expected(worker)
        older = bisect.bisect_left(trees, self.tree)
        own = fleet.size(tree, self.length - tree.shared + self._sampling())
        return not older or tree.shared + sums[older] + own <= capacity or fleet.low(worker)


def _nearest(workers: Sequence[Worker], held: Mapping[str, int]) -> Worker:
    """The worker, not overloaded, that holds most of a prefix. held: prefix tokens by worker."""
    least = min(worker.share for worker in workers)
    near = [worker for worker in workers if worker.share <= least + AFFINITY_SLACK]
    return max(near, key=lambda worker: (held[worker.name], -worker.share))
