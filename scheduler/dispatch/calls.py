"""The dispatcher's records of workers and calls. Only the dispatcher changes them."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from coppice.common.numbers import Count, Positive
from coppice.scheduler.dispatch.placement import Breaker, Place
from coppice.wire.arrays import Frame
from coppice.wire.faults import Fault
from coppice.wire.messages import Register

Check = Callable[[Any], None]
"""Raises InfrastructureFault for an answer that cannot be right."""

STARTED = "the scheduler has started"
"""The name of the trace event at the beginning of each start of a run."""


class DispatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler.dispatch]: timing of workers and calls, in seconds, and the attempts of
    one call.

    heartbeat_s: time between two heartbeats of a worker. max_attempts: how often a call is made
    before its infrastructure fault is reported.
    """

    heartbeat_s: Positive = 2.0
    dead_after_s: Positive = 20.0
    """A worker that is silent for so long is given up and its calls move on; well above a long
    pause of a busy machine."""
    replace_after_s: Positive = 120.0
    """A process that is stopped or silent for so long is killed and started again by the launcher,
    which first asks for its stacks. Far above any computation that may hold up heartbeats, since
    updates and decoding run in threads and a process that loads is not yet known."""
    max_attempts: Count = 3


class Event(msgspec.Struct, frozen=True):
    """One attempt of one call, for traces. Times are in seconds of the monotonic clock.

    outcome: "ok", a kind of fault, "deadline", or "cancelled" (by the caller). caller: who waited
    for it, in words, or "". version: the one that the answer names, if it does (of ``train``: the
    version that trained the group). phases: the seconds of its parts, one after the other, if it
    tells them.
    """

    service: str
    worker: str
    start: float
    end: float
    outcome: str
    caller: str = ""
    version: int | None = None
    phases: dict[str, float] = {}


class Worker:
    """What the dispatcher knows about one connected worker. ``stats`` came with its last heartbeat,
    at ``beat_at``.

    joined: the number of its arrival. left_out: whether a pool has dropped an entry of it
    (``scheduler.pool``). answered: its answers so far. unanswered: calls in a row that passed their
    deadline here while no other call was answered. recent: its last attempts. key: its public key.
    """

    def __init__(self, identity: bytes, hello: Register, now: float, admission: str, key: str = ""):
        self.identity, self.hello, self.admission, self.key = identity, hello, admission, key
        self.name = hello.worker
        self.in_flight: dict[int, Attempt] = {}
        self.stats: dict[str, float] = {}
        self.beat_at = now
        self.breaker = Breaker()
        self.heard = now
        self.answered = self.unanswered = 0
        self._answered_at = now
        self.recent: deque[Event] = deque(maxlen=4)
        self.ready = False
        self.draining = False
        self.joined, self.left_out = 0, False

    @property
    def has_room(self) -> bool:
        """Whether the worker has fewer calls than its capacity."""
        return len(self.in_flight) < self.hello.capacity

    @property
    def share(self) -> float:
        """The used share of the capacity; above 1 when pinned calls were added to a full worker."""
        return len(self.in_flight) / self.hello.capacity

    def usable(self, now: float) -> bool:
        """Whether calls may be sent to the worker now, if it has room."""
        return self.ready and not self.draining and self.breaker.closed(now)

    def answers(self, now: float) -> None:
        """The worker has answered a call."""
        self.answered, self.unanswered, self._answered_at = self.answered + 1, 0, now

    def expires(self, attempt: "Attempt") -> None:
        """A call passed its deadline here. It counts only if nothing was answered since it began: a
        slow worker is not a stuck one."""
        self.unanswered += attempt.start >= self._answered_at

    def state(self, now: float) -> str:
        """How the worker treats calls now, in words that follow its name in a message."""
        if self.draining:
            return "is draining"
        if not self.breaker.closed(now):
            return f"rests after {self.breaker.threshold} failed calls in a row"
        return f"has {len(self.in_flight)} requests in flight of at most {self.hello.capacity}"


class Pending:
    """One call until its outcome. ``body`` is encoded once for all attempts; ``caller`` says in
    words who waits for the outcome.

    attempt: the attempt that is running now, if there is one. arrival, order: its place among the
    waiting calls.
    """

    __slots__ = (
        "arrival",
        "attempt",
        "body",
        "caller",
        "check",
        "deadline",
        "done",
        "failed_on",
        "last_fault",
        "order",
        "place",
        "result_type",
        "service",
        "since",
        "tries",
        "worker",
    )

    def __init__(
        self,
        service: str,
        body: list[Frame],
        result_type: type,
        deadline: float,
        place: Place | None,
        worker: str | None,
        caller: str,
        since: float,
        check: Check | None = None,
    ):
        self.service, self.body, self.result_type, self.deadline = (
            service,
            body,
            result_type,
            deadline,
        )
        self.place, self.worker = place, worker
        self.caller, self.since, self.check = caller, since, check
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.failed_on: frozenset[str] = frozenset()
        self.attempt: Attempt | None = None
        self.arrival = 0
        self.order: tuple[Any, ...] = ()
        self.tries = 0
        self.last_fault: Fault | None = None

    def settle(self, outcome: Any) -> None:
        """Set the outcome of the call. Later outcomes are ignored."""
        if self.done.done():
            return
        if isinstance(outcome, BaseException):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class Attempt:
    """One attempt to run a pending call on one worker."""

    __slots__ = ("number", "pending", "start", "worker")

    def __init__(self, number: int, pending: Pending, worker: Worker, start: float):
        self.number, self.pending, self.worker, self.start = number, pending, worker, start
