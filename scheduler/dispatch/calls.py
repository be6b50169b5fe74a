"""The dispatcher's records of workers and calls, which only the dispatcher changes, and ``Place``,
through which a call that knows more than the load chooses its worker itself."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coppice.common.concurrency import settle
from coppice.common.numbers import Count, Positive
from coppice.wire.arrays import Frame
from coppice.wire.faults import Fault
from coppice.wire.messages import Register

Check = Callable[[Any], None]
"""Raises InfrastructureFault for an answer that cannot be right."""

PARTS = 64
"""A call may expire later than asked, by at most this part of its time."""
FLOOR_S, TIMES, EVERY, KEPT = 1.0, 3.0, 32, 256
"""An attempt is late after ``TIMES`` the 99th percentile of its service's last ``KEPT`` answers,
which is taken anew at ``EVERY`` answers, and not before ``FLOOR_S`` seconds."""
FEWEST, PERIOD_S, SHARE = 12, 10.0, 0.2
"""A worker stalls in a period of so many calls and seconds if so large a share of them is given up.
"""
STARTED = "the scheduler has started"
"""The name of the trace event at the beginning of each start of a run."""


class DispatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler.dispatch]: timing of workers and calls."""

    heartbeat_s: Positive = 2.0
    """Seconds between two heartbeats of a worker."""
    dead_after_s: Positive = 20.0
    """Seconds of silence after which a worker is given up and its calls move on."""
    replace_after_s: Positive = 120.0
    """Seconds of silence after which the launcher asks a process for its stacks and replaces it;
    far above any computation that holds up heartbeats."""
    max_attempts: Count = 3
    """How often a call is made before its infrastructure fault is reported."""


class Event(msgspec.Struct, frozen=True):
    """One attempt of a call, for traces, in monotonic seconds. outcome: "ok", a kind of fault,
    "deadline" or "cancelled". caller: who waited. version: in the answer. phases: seconds."""

    service: str
    worker: str
    start: float
    end: float
    outcome: str
    caller: str = ""
    version: int | None = None
    phases: dict[str, float] = {}


class Breaker:
    """Keeps calls away from a worker for ``rest_s`` seconds after ``threshold`` failures in a row:
    closed -> open -> (rest_s passes) -> closed, where a single failure opens it again."""

    def __init__(self, threshold: int = 5, rest_s: float = 10.0):
        self.threshold, self.rest_s = threshold, rest_s
        self.failures = 0
        self.open_until = float("-inf")

    def record(self, ok: bool, now: float) -> None:
        self.failures = 0 if ok else self.failures + 1
        if self.failures >= self.threshold:
            self.open_until = now + self.rest_s
            self.failures = self.threshold - 1

    def closed(self, now: float) -> bool:
        """May this worker be used now?"""
        return now >= self.open_until


class Latency:
    """How long the attempts of a service take. limit: the seconds after which one is late; infinite
    until enough were answered."""

    def __init__(self) -> None:
        self.limit, self._count = math.inf, 0
        self._seconds: deque[float] = deque(maxlen=KEPT)

    def record(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._count += 1
        if self._count % EVERY == 0:
            slow = sorted(self._seconds)[-1 - len(self._seconds) // 100]
            self.limit = max(FLOOR_S, TIMES * slow)


class Worker:
    """A connected worker. stats: of its last heartbeat, at ``beat_at``. joined: the number of its
    arrival. left_out: whether a pool has dropped an entry of it. unanswered: calls in a row past
    their deadline while no other was answered. silent: for how long, as far as this process could
    hear. quiet: so long that it gets no calls. stalled: periods in a row in which it stalled.
    recent: its last attempts. key: its public key."""

    def __init__(self, identity: bytes, hello: Register, now: float, admission: str, key: str = ""):
        self.identity, self.hello, self.admission, self.key = identity, hello, admission, key
        self.name = hello.worker
        self.in_flight: dict[int, Attempt] = {}
        self.stats: dict[str, float] = {}
        self.breaker = Breaker()
        self.beat_at = self.heard = now
        self.silent, self.quiet = 0.0, False
        self.answered = self.unanswered = self.stalled = 0
        self._answered_at = self._period_at = now
        self._period = [0, 0]
        self.recent: deque[Event] = deque(maxlen=4)
        self.ready = self.draining = False
        self.joined, self.left_out = 0, False

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.hello.capacity

    @property
    def share(self) -> float:
        """The used share of the capacity; above 1 when pinned calls were added to a full worker."""
        return len(self.in_flight) / self.hello.capacity

    def usable(self, now: float) -> bool:
        """Whether calls may be sent to the worker now, if it has room."""
        return self.ready and not (self.draining or self.quiet) and self.breaker.closed(now)

    def answers(self, now: float) -> None:
        self.answered, self.unanswered, self._answered_at = self.answered + 1, 0, now
        self._count(False, now)

    def expires(self, attempt: "Attempt", now: float) -> None:
        """A call passed its deadline. It counts only if nothing was answered meanwhile."""
        self.unanswered += attempt.start >= self._answered_at
        self._count(True, now)

    def stalls(self, attempt: "Attempt", now: float) -> None:
        """A late call was answered by another worker. Calls that stall together count once."""
        if attempt.start >= self._answered_at:
            self.unanswered, self._answered_at = self.unanswered + 1, now
        self._count(True, now)

    def _count(self, late: bool, now: float) -> None:
        self._period[late] += 1
        if now - self._period_at >= PERIOD_S and (calls := sum(self._period)) >= FEWEST:
            self.stalled = self.stalled + 1 if self._period[True] >= SHARE * calls else 0
            self._period, self._period_at = [0, 0], now

    def state(self, now: float) -> str:
        """How the worker treats calls now, in words that follow its name in a message."""
        if self.draining:
            return "is draining"
        if self.quiet:
            return f"has been silent for {self.silent:.0f} s"
        if not self.breaker.closed(now):
            return f"rests after {self.breaker.threshold} failed calls in a row"
        return f"has {len(self.in_flight)} requests in flight of at most {self.hello.capacity}"


def roomy(workers: Sequence[Worker], avoid: frozenset[str] = frozenset()) -> list[Worker]:
    """The workers with room. Those to ``avoid``, which failed this call, are used only if there is
    no other at all: a worker that fails fast always has room and would swallow every attempt."""
    return [w for w in [w for w in workers if w.name not in avoid] or workers if w.has_room]


class Place:
    """How one call is ordered and placed: here by its rank, then first in, first out, for the least
    loaded worker. ``rank`` and ``choose`` are asked while it waits, ``started`` and ``ended`` once
    per attempt."""

    _rank: tuple[Any, ...] = ()

    def __init__(self, *rank: Any):
        self._rank = rank

    def rank(self) -> tuple[Any, ...]:
        """The sorting key among waiting calls; equal ranks keep their order. It may change."""
        return self._rank

    def waits_with(self) -> Any:
        """What it shares with calls behind it that wait if this one must; None: they may start."""
        return None

    def homes(self) -> Collection[str]:
        """The workers that it prefers, which it is shown also in a large fleet."""
        return ()

    def choose(self, workers: Sequence[Worker], avoid: frozenset[str]) -> Worker | None:
        """The worker to run on now, or None to wait until a call ends or a heartbeat comes.
        workers: the usable ones, or some of many (``pool``); avoid: see ``roomy``."""
        return min(roomy(workers, avoid), key=lambda worker: worker.share, default=None)

    def started(self, worker: str) -> None:
        """An attempt was sent to ``worker``."""

    def ended(self, worker: str, result: Any | None) -> None:
        """The attempt has ended. result: None unless it was served."""


LEAST_LOADED = Place()


@dataclass(slots=True, eq=False)
class Pending:
    """One call until its outcome.

    body: encoded once for all attempts. caller: who waits for the outcome, in words. attempts:
    those that are running now, several of a hedged call. waiting: whether one more will be made.
    arrival, order: its place among the waiting calls.
    """

    service: str
    body: list[Frame]
    result_type: type
    deadline: float
    place: Place
    worker: str | None
    caller: str
    since: float
    check: Check | None = None
    done: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    failed_on: frozenset[str] = frozenset()
    attempts: "list[Attempt]" = field(default_factory=list)
    waiting: bool = False
    arrival: int = 0
    order: tuple[Any, ...] = ()
    tries: int = 0
    last_fault: Fault | None = None

    @property
    def chooses(self) -> bool:
        """Whether its place chooses the worker, which otherwise is the least loaded one."""
        return type(self.place) is not Place

    def settle(self, outcome: Any) -> None:
        """Set the outcome of the call. Later outcomes are ignored."""
        settle(self.done, outcome)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to run a pending call on one worker. late: it takes far longer than usual."""

    number: int
    pending: Pending
    worker: Worker
    start: float
    late: bool = False


class Deadlines:
    """Calls ``expire`` for each call whose time is over and that was not discarded before. One
    timer serves many calls: with 20,000 open calls, one each costs more than all else of a call."""

    def __init__(self, expire: Callable[[Pending, float], None]):
        self._expire = expire
        self._due: dict[float, tuple[dict[Pending, float], asyncio.TimerHandle]] = {}

    def __iter__(self) -> Iterator[Pending]:
        """The calls, of which none may come or go meanwhile."""
        return itertools.chain.from_iterable(calls for calls, _ in self._due.values())

    def add(self, pending: Pending, seconds: float) -> float:
        """Let a call expire in ``seconds``, and return the moment that ``discard`` needs."""
        loop = asyncio.get_running_loop()
        step = 2.0 ** math.floor(math.log2(max(seconds, 1e-3))) / PARTS
        moment = math.ceil((loop.time() + seconds) / step) * step
        if (due := self._due.get(moment)) is None:
            due = self._due[moment] = {}, loop.call_at(moment, self._reach, moment)
        due[0][pending] = seconds
        return moment

    def discard(self, pending: Pending, moment: float) -> None:
        if (due := self._due.get(moment)) is not None:
            due[0].pop(pending, None)
            if not due[0]:
                due[1].cancel()
                del self._due[moment]

    def _reach(self, moment: float) -> None:
        for pending, seconds in self._due.pop(moment)[0].items():
            self._expire(pending, seconds)
