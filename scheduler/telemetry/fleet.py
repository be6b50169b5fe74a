"""Which actor generates for which tree, and when: prefix affinity, depth first, no more trees at
once than the caches hold.

A tree begins on the actor with the least load and the emptiest cache. Its later calls go to the
actor that holds most of their prefix, unless that actor is overloaded; siblings wait side by side.
Trees that have begun come before new ones, older trees before younger ones. A call waits while
older trees leave no cache room for its tree: a new tree considers every actor, a tree that has
begun only the holder of its prefix. The oldest tree never waits. An actor that has decoded fewer
than ``batch`` samples for ``PATIENCE_S`` takes a call anyway. So no call waits forever, and no
engine waits for a slow judge.

This is pure but for the injected clock. The dispatcher asks for decisions
(``scheduler.placement.Place``) and does the I/O.
"""

import bisect
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from coppice.scheduler.dispatch.placement import Load, Place, roomy
from coppice.scheduler.dispatch.pool import FEW, LOOKED_AT
from coppice.scheduler.dispatch.residency import Residency
from coppice.wire.messages import GenerateRequest, GenerateResult

AFFINITY_SLACK = 0.5
"""Affinity is given up when the holder of a prefix is fuller than the least loaded actor by more
than this share of its capacity: elsewhere the prefix costs one prefill, while a queue delays every
request behind it."""
PATIENCE_S = 0.2
"""Seconds within which a tree sends its next call after an answer, unless a judge or a tool is
slow."""
KEPT = 64
"""The expected need of a tree is the mean over so many ended trees."""
HOMES = 4
"""A tree's calls look for their prefix on so many actors where the tree has been last."""
MEMORY = 0.99
"""Weight of the earlier samples in the moving mean of the length of a sample."""
CAPACITY = "kv_capacity_tokens"
"""The gauge in a worker's heartbeat that says how many tokens its cache holds."""


class Seat(msgspec.Struct):
    """A tree's place in an actor's cache, in tokens beyond those that the tree shares with other
    trees.

    path: the longest prompt so far; sampling: expected new tokens of the calls in flight; need: the
    largest sum of both so far.
    """

    path: int = 0
    sampling: float = 0.0
    calls: int = 0
    need: float = 0.0


class Growing(msgspec.Struct):
    """A tree that has begun. shared: tokens of its first prompt that an actor had cached; first:
    tokens its first call needed besides. actors: where it has been, the last one last."""

    shared: int
    first: float
    actors: list[str] = []


class Fleet:
    """The trees on all actors. ``call`` makes the place of one generate call; ``ended`` must be
    called when a tree is done.

    steps: the turns that a tree is assumed to take, until ended trees show what a tree needs.
    batch: the samples that an actor decodes together. One with fewer takes on trees even if its
    prefix cache has no room for them (0: it never does).
    """

    def __init__(
        self, steps: int = 4, batch: int = 24, clock: Callable[[], float] = time.monotonic
    ):
        self.residency = Residency()
        self.steps, self.batch = steps, batch
        self._clock = clock
        self._decoding: Counter[str] = Counter()
        self._low_since: dict[str, float] = {}
        self._trees: dict[int, Growing] = {}
        self._seats: dict[str, dict[int, Seat]] = {}
        self._sums: dict[str, tuple[list[int], list[float]]] = {}
        self._needs: deque[float] = deque(maxlen=KEPT)
        self._mean: float | None = None
        self._sampled: float | None = None

    def call(self, tree: int, request: GenerateRequest, beside: bool = False) -> Place:
        """The place of a call of ``tree``. beside: the call serves no trained trajectory, so the
        calls of those go first."""
        return Generation(self, tree, request, beside)

    def ended(self, tree: int) -> None:
        """The tree needs no more calls: free its room, and remember what it needed as the measure
        for other trees."""
        growing = self._trees.pop(tree, None)
        here = (
            [self._seats.get(actor, {}) for actor in growing.actors] if growing is not None else []
        )
        needs = [seats.pop(tree).need for seats in here if tree in seats]
        if needs:
            self._needs.append(max(needs))
            self._mean = sum(self._needs) / len(self._needs)
            self._sums.clear()

    def left(self, worker: str) -> None:
        """Forget a worker that is gone, or whose name belongs to a new worker."""
        self.residency.forget(worker)
        for by_worker in (self._seats, self._sums, self._decoding, self._low_since):
            by_worker.pop(worker, None)

    # ------------------------------------------------------------------------------------------
    # decisions

    def begun(self, tree: int) -> bool:
        """Whether a call of the tree was ever sent."""
        return tree in self._trees

    def homes(self, tree: int) -> list[str]:
        """The actors that probably hold most of the prefix of a tree's next call; none before it
        has begun."""
        return self._trees[tree].actors[-HOMES:] if tree in self._trees else []

    def choose(
        self, call: "Generation", loads: Sequence[Load], avoid: frozenset[str]
    ) -> str | None:
        """The actor on which a call starts now, or None if the call must wait."""
        for load in loads:
            if CAPACITY in load.stats:
                self.residency.limit(load.worker, load.stats[CAPACITY])
        free = roomy(loads, avoid)
        tree = self._trees.get(call.tree) or self._begin(call)
        fitting = [load for load in free if self._fits(call, tree, load)]
        if not fitting:
            return None
        if not self.begun(call.tree):
            return min(fitting, key=self._crowd).worker
        homes = {load.worker for load in free} if len(loads) <= FEW else set(tree.actors)
        held = {
            w: self.residency.expect(w, call.tokens) if w in homes else tree.shared
            for w in (f.worker for f in free)
        }
        home = self._nearest(free, held)
        best = home if home in fitting else self._nearest(fitting, held)
        moved = held[best.worker] < held[home.worker]
        return None if moved and not self._low(best.worker) else best.worker

    def _nearest(self, loads: Sequence[Load], held: Mapping[str, int]) -> Load:
        """The worker that holds most of a prefix, among those that are not overloaded. held: prefix
        tokens by worker."""
        least = min(load.share for load in loads)
        near = [load for load in loads if load.share <= least + AFFINITY_SLACK]
        return max(near, key=lambda load: (held[load.worker], -load.share))

    def _fits(self, call: "Generation", tree: Growing, load: Load) -> bool:
        """Whether older trees on the worker leave cache room for this call's tree. The oldest
        always fits, and any tree while ``_low``."""
        capacity = self.residency.capacity(load.worker)
        if math.isinf(capacity):
            return True
        trees, sums = self._expected(load.worker)
        older = bisect.bisect_left(trees, call.tree)
        if not older:
            return True
        own = self._size(tree, call.length - tree.shared + self.sampling(call))
        return tree.shared + sums[older] + own <= capacity or self._low(load.worker)

    def _expected(self, worker: str) -> tuple[list[int], list[float]]:
        """The trees on a worker, ascending, and the tokens that the first 0, 1, 2, ... of them are
        expected to need."""
        if worker not in self._sums:
            seats = sorted(self._seats.get(worker, {}).items())
            sizes = (self._size(self._trees[tree], seat.need) for tree, seat in seats)
            self._sums[worker] = [tree for tree, _ in seats], [0.0, *itertools.accumulate(sizes)]
        return self._sums[worker]

    def _low(self, worker: str) -> bool:
        """Whether the worker has been decoding less than a batch for at least ``PATIENCE_S``."""
        never = math.inf if worker in self._decoding else -math.inf
        return self._clock() - self._low_since.get(worker, never) >= PATIENCE_S

    def _crowd(self, load: Load) -> tuple[float, int]:
        """How crowded a worker is for a new tree: its load plus the taken share of its cache, then
        its number of trees."""
        capacity = self.residency.capacity(load.worker)
        taken = 0.0 if math.isinf(capacity) else self._expected(load.worker)[1][-1] / capacity
        return load.share + taken, len(self._seats.get(load.worker, ()))

    def _size(self, tree: Growing, need: float) -> float:
        """Tokens that a tree is expected to need in all, from its own need so far and the needs of
        ended trees."""
        return max(need, self.steps * tree.first if self._mean is None else self._mean)

    def _begin(self, call: "Generation") -> Growing:
        # what trees share, such as instructions, is on any of them
        some = itertools.islice(self._seats, LOOKED_AT)
        shared = max((self.residency.expect(worker, call.tokens) for worker in some), default=0)
        return Growing(shared, call.length - shared + self.sampling(call))

    def sampling(self, call: "Generation") -> float:
        """Tokens that the call is expected to sample, from the mean length of samples so far."""
        longest = call.request.sampling.max_tokens
        return call.request.n * (longest if self._sampled is None else min(longest, self._sampled))

    # ------------------------------------------------------------------------------------------
    # events

    def started(self, call: "Generation", worker: str) -> "Sent":
        """An attempt of the call was sent to ``worker``: it takes room there."""
        tree = self._trees.get(call.tree)
        if tree is None:
            tree = self._trees[call.tree] = self._begin(call)
        for actor in tree.actors:
            seats = self._seats.get(actor, {})
            if actor != worker and call.tree in seats and not seats[call.tree].calls:
                del seats[call.tree]  # the tree has moved
                self._sums.pop(actor, None)
        tree.actors = [actor for actor in tree.actors if actor != worker] + [worker]
        sent = Sent(self.residency.started(worker, call.tokens), self.sampling(call))
        seat = self._seats.setdefault(worker, {}).setdefault(call.tree, Seat())
        seat.calls += 1
        seat.path = max(seat.path, call.length - tree.shared)
        seat.sampling += sent.sampling
        seat.need = max(seat.need, seat.path + seat.sampling)
        self._sums.pop(worker, None)
        self._decode(worker, call.request.n)
        return sent

    def finished(
        self, call: "Generation", worker: str, sent: "Sent", result: GenerateResult | None
    ) -> None:
        """An attempt has ended. If it was served, its samples are now in the worker's cache."""
        seats = self._seats.get(worker, {})
        if (seat := seats.get(call.tree)) is not None:
            seat.calls -= 1
            seat.sampling -= sent.sampling
        self._decode(worker, -call.request.n)
        if result is None:
            return
        self.residency.compared(result.prompt_tokens, sent.expected, result.cached_tokens)
        for sample in result.samples:
            if len(sample.tokens):
                self._sampled = len(sample.tokens) + MEMORY * (
                    (self._sampled or len(sample.tokens)) - len(sample.tokens)
                )
                tokens = call.tokens + sample.tokens[:-1].astype(np.int32, copy=False).tobytes()
                self.residency.sampled(worker, tokens, int(sample.versions[0]))

    def _decode(self, worker: str, samples: int) -> None:
        """Add ``samples`` to those the worker is decoding, and note since when they are fewer than
        a batch."""
        self._decoding[worker] += samples
        if self._decoding[worker] >= self.batch:
            self._low_since.pop(worker, None)
        else:
            self._low_since.setdefault(worker, self._clock())


class Sent(msgspec.Struct, frozen=True):
    """An attempt in flight. expected: prompt tokens that should be cached; sampling: tokens it is
    expected to sample."""

    expected: int
    sampling: float


class Generation(Place):
    """The place of one generate call of a tree.

    tokens: the prompt as the bytes of int32 [length]. beside: the call serves no trained
    trajectory.
    """

    def __init__(self, fleet: Fleet, tree: int, request: GenerateRequest, beside: bool):
        self.fleet, self.tree, self.request, self.beside = fleet, tree, request, beside
        self.tokens = request.tokens.astype(np.int32, copy=False).tobytes()
        self.length = len(request.tokens)
        self._sent: dict[str, Sent] = {}

    def rank(self) -> tuple[Any, ...]:
        """Trained trajectories first; then trees that have begun, older trees, deeper prompts;
        siblings side by side."""
        return self.beside, not self.fleet.begun(self.tree), self.tree, -self.length, self.tokens

    def waits_with(self) -> Any:
        """A tree that has not begun does not overtake an older one that has no cache room yet."""
        return None if self.fleet.begun(self.tree) else "new"

    def homes(self) -> list[str]:
        """See ``Fleet.homes``."""
        return self.fleet.homes(self.tree)

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        """See ``Fleet.choose``."""
        return self.fleet.choose(self, loads, avoid)

    def started(self, worker: str) -> None:
        """The prompt is entering the worker's cache."""
        self._sent[worker] = self.fleet.started(self, worker)

    def ended(self, worker: str, result: Any | None) -> None:
        """The samples are in the worker's cache if the attempt was served; otherwise nothing is
        known about them."""
        self.fleet.finished(self, worker, self._sent.pop(worker), result)
