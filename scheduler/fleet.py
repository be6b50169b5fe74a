"""Which actor generates for which tree, and when: prefix affinity, depth first, no more trees at once than the caches hold.

A tree begins on the actor with the least load and the emptiest cache. Its later calls go where most of their prefix is, unless that
actor is overloaded; siblings wait side by side. Trees that have begun come before new ones, older before younger. A tree's call
waits while the older trees leave its own tokens no room: a new tree's on every actor, another's where its prefix is. The oldest tree
never waits, and an actor that decodes fewer than ``batch`` samples for ``PATIENCE_S`` takes a call all the same: so nothing waits for
ever, and no engine for a slow judge.

Pure but for the injected clock: the dispatcher asks (``scheduler.placement.Place``) and does the I/O.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from scheduler.placement import Load, Place, roomy
from scheduler.residency import Residency
from wire.messages import GenerateRequest, GenerateResult

AFFINITY_SLACK = 0.5
"""An actor that holds a prefix may be fuller than the least loaded one by this share of its capacity before affinity is given up:
a prefix costs one prefill elsewhere, a queue costs every request behind it."""
PATIENCE_S = 0.2
"""A tree whose call has just been answered comes back within this time, unless a judge or a tool is slow."""
KEPT = 64
"""Ended trees whose need is the measure for the next."""
MEMORY = 0.99
"""Weight of the samples before in the mean length of a sample."""
CAPACITY = "kv_capacity_tokens"
"""The gauge of a worker's heartbeat."""


class Seat(msgspec.Struct):
    """A tree's place in an actor's cache, in tokens beyond what it shares with other trees.

    path: the longest prompt so far; sampling: expected new tokens of its calls in flight; need: the most of both at once.
    """

    path: int = 0
    sampling: float = 0.0
    calls: int = 0
    need: float = 0.0


class Growing(msgspec.Struct):
    """A tree that has begun. shared: tokens of its first prompt that an actor had already; first: what that call needed beyond."""

    shared: int
    first: float


class Fleet:
    """All actors. ``call`` makes the place of one generate call; ``ended`` frees a tree's.

    steps: turns a tree is taken to have until the first trees have ended and shown what they need. batch: see ``PlacementConfig``.
    """

    def __init__(self, steps: int = 4, batch: int = 16, clock: Callable[[], float] = time.monotonic):
        self.residency = Residency()
        self.steps, self.batch = steps, batch
        self._clock = clock
        self._decoding: Counter[str] = Counter()
        self._low_since: dict[str, float] = {}
        self._trees: dict[int, Growing] = {}
        self._seats: dict[str, dict[int, Seat]] = {}
        self._needs: deque[float] = deque(maxlen=KEPT)
        self._sampled: float | None = None

    def call(self, tree: int, request: GenerateRequest, beside: bool = False) -> Place:
        """The place of a call of ``tree``. beside: it is not on the way of a trained trajectory, whose calls come first."""
        return Generation(self, tree, request, beside)

    def ended(self, tree: int) -> None:
        """The tree needs no more: its room is free, what it needed is the measure for others."""
        seats = [seats.pop(tree) for seats in self._seats.values() if tree in seats]
        if seats:
            self._needs.append(max(seat.need for seat in seats))
        self._trees.pop(tree, None)

    def left(self, worker: str) -> None:
        """The worker is gone, or a new one has its name."""
        self.residency.forget(worker)
        for known in (self._seats, self._decoding, self._low_since):
            known.pop(worker, None)

    # ------------------------------------------------------------------------------------------ decisions

    def begun(self, tree: int) -> bool:
        """Was a call of the tree sent?"""
        return tree in self._trees

    def choose(self, call: "Generation", loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        """The actor for a call now; None: it waits."""
        for load in loads:
            if CAPACITY in load.stats:
                self.residency.limit(load.worker, load.stats[CAPACITY])
        free = roomy(loads, avoid)
        fitting = [load for load in free if self._fits(call, load)]
        if not fitting:
            return None
        if not self.begun(call.tree):
            return min(fitting, key=self._crowd).worker
        held = {load.worker: self.residency.expect(load.worker, call.tokens) for load in free}
        home = self._nearest(free, held)
        best = home if home in fitting else self._nearest(fitting, held)
        moved = held[best.worker] < held[home.worker]
        return None if moved and not self._low(best.worker) else best.worker

    def _nearest(self, loads: Sequence[Load], held: Mapping[str, int]) -> Load:
        """The worker that holds most of a prefix, of those that are not overloaded."""
        least = min(load.share for load in loads)
        near = [load for load in loads if load.share <= least + AFFINITY_SLACK]
        return max(near, key=lambda load: (held[load.worker], -load.share))

    def _fits(self, call: "Generation", load: Load) -> bool:
        """Do the older trees on the worker leave room for this one? The oldest fits anyhow, and any where there is too little to do."""
        capacity = self.residency.capacity(load.worker)
        seats = self._seats.get(load.worker, {})
        older = [self._size(self._trees[tree], seat.need) for tree, seat in seats.items() if tree < call.tree]
        if math.isinf(capacity) or not older:
            return True
        tree = self._trees.get(call.tree) or self._begin(call)
        own = self._size(tree, call.length - tree.shared + self.sampling(call))
        return tree.shared + sum(older) + own <= capacity or self._low(load.worker)

    def _low(self, worker: str) -> bool:
        """Has the worker had less than a batch to decode for a while?"""
        never = math.inf if worker in self._decoding else -math.inf
        return self._clock() - self._low_since.get(worker, never) >= PATIENCE_S

    def _crowd(self, load: Load) -> tuple[float, int]:
        """How little a worker suits a new tree: load and taken cache as shares, then the number of its trees."""
        seats = self._seats.get(load.worker, {})
        taken = sum(self._size(self._trees[tree], seat.need) for tree, seat in seats.items())
        return load.share + taken / self.residency.capacity(load.worker), len(seats)

    def _size(self, tree: Growing, need: float) -> float:
        """Tokens a tree will need at most, by what it has needed and what ended trees did."""
        return max(need, sum(self._needs) / len(self._needs) if self._needs else self.steps * tree.first)

    def _begin(self, call: "Generation") -> Growing:
        shared = max((self.residency.expect(worker, call.tokens) for worker in self._seats), default=0)
        return Growing(shared, call.length - shared + self.sampling(call))

    def sampling(self, call: "Generation") -> float:
        """Tokens the call will sample, by the length of samples so far."""
        longest = call.request.sampling.max_tokens
        return call.request.n * (longest if self._sampled is None else min(longest, self._sampled))

    # ------------------------------------------------------------------------------------------ what happened

    def started(self, call: "Generation", worker: str) -> "Sent":
        """A call went out."""
        tree = self._trees.get(call.tree)
        if tree is None:
            tree = self._trees[call.tree] = self._begin(call)
        for name, seats in self._seats.items():
            if name != worker and call.tree in seats and not seats[call.tree].calls:
                del seats[call.tree]  # it moved
        sent = Sent(self.residency.started(worker, call.tokens), self.sampling(call))
        seat = self._seats.setdefault(worker, {}).setdefault(call.tree, Seat())
        seat.calls += 1
        seat.path = max(seat.path, call.length - tree.shared)
        seat.sampling += sent.sampling
        seat.need = max(seat.need, seat.path + seat.sampling)
        self._decode(worker, call.request.n)
        return sent

    def finished(self, call: "Generation", worker: str, sent: "Sent", result: GenerateResult | None) -> None:
        """An attempt is over; after a served one its samples are in the worker's cache."""
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
        """The worker decodes so many samples more; since when has it been fewer than a batch?"""
        self._decoding[worker] += samples
        if self._decoding[worker] >= self.batch:
            self._low_since.pop(worker, None)
        else:
            self._low_since.setdefault(worker, self._clock())


class Sent(msgspec.Struct, frozen=True):
    """An attempt on its way. expected: tokens of its prompt that should be cached; sampling: tokens it will sample."""

    expected: int
    sampling: float


class Generation(Place):
    """The place of one generate call of a tree.

    tokens: its prompt as the bytes of int32 [length]. beside: not on the way of a trained trajectory.
    """

    def __init__(self, fleet: Fleet, tree: int, request: GenerateRequest, beside: bool):
        self.fleet, self.tree, self.request, self.beside = fleet, tree, request, beside
        self.tokens = request.tokens.astype(np.int32, copy=False).tobytes()
        self.length = len(request.tokens)
        self._sent: dict[str, Sent] = {}

    def rank(self) -> tuple[Any, ...]:
        """Trained trajectories first; trees that have begun, the oldest first, in it the deepest; siblings side by side."""
        return self.beside, not self.fleet.begun(self.tree), self.tree, -self.length, self.tokens

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        """See ``Fleet.choose``."""
        return self.fleet.choose(self, loads, avoid)

    def started(self, worker: str) -> None:
        """Its prompt is on the way into the worker's cache."""
        self._sent[worker] = self.fleet.started(self, worker)

    def ended(self, worker: str, result: Any | None) -> None:
        """Its samples are in the worker's cache, or nobody knows."""
        self.fleet.finished(self, worker, self._sent.pop(worker), result)
