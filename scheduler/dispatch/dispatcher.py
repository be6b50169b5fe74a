"""Every dispatched call reaches exactly one outcome: a result, a classified fault, or its caller's
cancellation. States of a call: waiting -> running -> (fault -> backoff -> waiting)* -> done. After
an infrastructure fault or the death of a worker it moves to another worker; its deadline covers all
attempts together. An attempt that is late, as the answers of its service go, is hedged: its call
waits and runs beside it on another worker, and the first answer is the outcome. Late answers are
only counted."""

import asyncio
import bisect
import itertools
import logging
import operator
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coppice.scheduler.dispatch import bounds, calls
from coppice.scheduler.dispatch.calls import Attempt, DispatchConfig, Event, Pending, Place, Worker
from coppice.scheduler.dispatch.pool import Pool
from coppice.scheduler.dispatch.roster import Roster
from coppice.wire import arrays
from coppice.wire import messages as wire
from coppice.wire.arrays import Frame, encode
from coppice.wire.faults import FAULTS, DataFault, Fault, InfrastructureFault, Refused, WireError
from coppice.wire.keys import RunKeys
from coppice.wire.service import REGISTER_AGAIN, service_types
from coppice.wire.sockets import Router

log = logging.getLogger("scheduler.dispatch")

_LOOK_AHEAD = 64
"""The most queued calls that are passed over, because each waits for a certain worker."""
_AT_DEADLINE_S = 1.0
"""An error this short before the deadline of its call means that the worker gave the call up at the
deadline, a moment before this process."""
_TOLD = 8
"""The most workers that are named in the message of a call that found none."""
_BY_ORDER = operator.attrgetter("order")
_LOOK_AGAIN_S = 0.05
"""Seconds until held-back calls are tried again although nothing happened."""
_LOOK_FOR_LATE_S = 0.25
"""Seconds between two searches for late attempts."""


def backoff(attempt: int, rng: random.Random, base_s: float = 0.05, most_s: float = 5.0) -> float:
    """Seconds before the next attempt: exponential, the upper half drawn at random."""
    ceiling = min(most_s, base_s * 2 ** min(attempt, 30))
    return ceiling * (0.5 + 0.5 * rng.random())


def _order(pending: Pending) -> tuple[Any, ...]:
    """The sorting key: retried calls, then the ranks of their places, then the order of arrival."""
    return not pending.failed_on, *pending.place.rank(), pending.arrival


def _insert(queue: deque[Pending], pending: Pending) -> None:
    if not queue or queue[-1].order <= pending.order:
        queue.append(pending)
    else:
        bisect.insort(queue, pending, key=_BY_ORDER)


def _forget(queue: deque[Pending], pending: Pending) -> None:
    at = bisect.bisect_left(queue, pending.order, key=_BY_ORDER)
    if at < len(queue) and queue[at] is pending:
        del queue[at]


class Dispatcher:
    """Owns the calls, and the workers in its ``roster``, from ``start`` to ``close``. counters:
    calls, retries, timeouts, failed, late_attempts, hedged, late_answers, malformed_peers,
    refused_peers, dead_workers, lost_calls, refused_answers. on_fault(service, fault, caller).
    declared: by the run's judges, by service. router, clock: what a simulation replaces."""

    on_event: Callable[[Event], None] | None = None
    on_fault: Callable[[str, Fault, str], None] | None = None

    def __init__(
        self, bind: str, keys: RunKeys | None, config: DispatchConfig = DispatchConfig(),
        seed: int = 0, router: Router | None = None, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.router, self.clock, self.config = router or Router(bind, keys), clock, config
        self.endpoint, self.counters = self.router.endpoint, Counter[str]()
        told = self._pump_all, self._fail_all
        self.roster = Roster(self.router, config, clock, self.counters, *told)
        self.workers, self.wait_for = self.roster.workers, self.roster.wait_for
        self._arrivals = itertools.count()
        self._rng = random.Random(seed)
        self._open = calls.Deadlines(self._expire)
        self._waiting: defaultdict[str, deque[Pending]] = defaultdict(deque)
        self._latencies: defaultdict[str, calls.Latency] = defaultdict(calls.Latency)
        self._again_at: dict[str, asyncio.TimerHandle] = {}
        self.declared: dict[str, bounds.JudgeGives] = {}
        self._told: set[str] = set()  # the workers of which a refused answer was reported
        self._closed = False

    async def start(self) -> None:
        """Start to receive messages and to watch for dead workers."""
        self.router.listen(self._receive).add_done_callback(self.roster.ended)
        self.roster.start()
        self.roster.spawn(self._look_for_late())

    async def call(
        self, service: str, request: msgspec.Struct, *, deadline: float,
        place: Place = calls.LEAST_LOADED, worker: str | None = None, caller: str = "",
        check: calls.Check | None = None,
    ) -> Any:  # fmt: skip
        """Run ``request`` on a worker that offers ``service`` and return its result struct.

        deadline: seconds for the whole call, including waiting and retries. place: chooses the
        worker and is told of every attempt.
        worker: if named, the call goes to this worker only, at once, once, even if the worker is
        full. caller: words that ``on_fault`` gets; without them ``on_fault`` is not called. check:
        an answer that it refuses counts as an infrastructure fault of its worker.

        Raises InfrastructureFault when the deadline passed, ``max_attempts`` attempts failed or the
        named ``worker`` is gone; DataFault as the worker reported it; WireError when ``request``
        cannot be sent.
        """
        if self._closed:
            raise InfrastructureFault(f"{service} was called after the dispatcher was closed")
        since, result_type = self.clock(), service_types(service)[1]
        body, until = arrays.encode_body(request), since + deadline
        arrays.check(body, arrays.Limits())
        pending = Pending(service, body, result_type, until, place, worker, caller, since, check)
        self.counters["calls"] += 1
        moment = self._open.add(pending, deadline)
        try:
            self._enter(pending)
            return await pending.done
        finally:
            self._open.discard(pending, moment)
            self._abandon(pending, "cancelled")
            if pending.waiting:
                _forget(self._waiting[pending.service], pending)
            # The future holds the error, whose traceback holds this frame: without this, a cycle
            # with the whole request in it.
            del pending

    def open_calls(self) -> list[Pending]:
        """All calls that have no outcome yet."""
        return list(self._open)

    def look_again(self, service: str) -> None:
        """Start waiting calls while workers have room, since what held them back changed."""
        if not (queue := self._waiting.get(service)):
            return
        pool, now, refused, passed = self.roster.pools[service], self.clock(), set(), 0
        while passed < min(len(queue), _LOOK_AHEAD) and (least := pool.least(now)) is not None:
            pending = queue[passed]
            kind = pending.place.waits_with()
            if pending.done.done():
                del queue[passed]  # its caller was cancelled and has not run since
            elif kind in refused or (worker := self._place(pending, pool, least, now)) is None:
                refused |= {kind} - {None}
                passed += 1
            else:
                del queue[passed]
                self._start(pending, worker)
                if pending.chooses:
                    self._reorder(queue, passed)
        held_back = any(queue[at].chooses for at in range(passed))
        if held_back and pool.least(now) is not None:
            self._look_later(service)

    async def close(self) -> None:
        """Stop. Calls that are still open fail with InfrastructureFault."""
        self._closed = True
        for timer in self._again_at.values():
            timer.cancel()
        for pending in list(self._open):
            pending.attempts.clear()
            pending.settle(InfrastructureFault("the dispatcher was closed"))
        self._waiting.clear()
        await self.roster.close()

    def _enter(self, pending: Pending) -> None:
        if pending.worker is None:
            self._queue(pending)
        elif (pinned := self.roster.by_name.get(pending.worker)) is not None:
            # A call pinned to a worker never waits: new weights must reach an actor that is still
            # joining or that is full.
            self._start(pending, pinned)
        else:
            self.counters["failed"] += 1
            here = sorted(self.roster.by_name)
            fault = f"{pending.service}: no worker {pending.worker!r} is here, only {here}"
            pending.settle(InfrastructureFault(fault))

    def _queue(self, pending: Pending) -> None:
        pending.arrival = next(self._arrivals)
        pending.order, pending.waiting = _order(pending), True
        _insert(self._waiting[pending.service], pending)
        self.look_again(pending.service)

    def _reorder(self, queue: deque[Pending], at: int) -> None:
        """Move the calls from ``at`` on whose ranks have changed: those of one begun tree."""
        while at < len(queue) and (order := _order(queue[at])) != queue[at].order:
            moved = queue[at]
            del queue[at]
            moved.order = order
            _insert(queue, moved)

    def _look_later(self, service: str) -> None:
        def look() -> None:
            del self._again_at[service]
            self.look_again(service)

        if service not in self._again_at:
            self._again_at[service] = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, look)

    def _place(self, pending: Pending, pool: Pool, least: Worker, now: float) -> Worker | None:
        if not pending.chooses:
            return pool.least(now, pending.failed_on) if pending.failed_on else least
        shown = pool.shown(now, pending.place.homes(), pending.failed_on)
        return pending.place.choose(shown, pending.failed_on)

    def _changed(self, worker: Worker) -> None:
        worker.left_out = False
        for service in worker.hello.services:
            self.roster.pools[service].touch(worker)

    def _start(self, pending: Pending, worker: Worker) -> None:
        now = self.clock()
        number = next(self.roster.numbers)
        pending.tries, pending.waiting = pending.tries + 1, False
        attempt = worker.in_flight[number] = Attempt(number, pending, worker, now)
        pending.attempts.append(attempt)
        self._changed(worker)
        header = wire.Request(number, pending.service, max(0.001, pending.deadline - now))
        self.router.send([worker.identity, *encode(header), *pending.body])
        pending.place.started(worker.name)

    def _finish(self, attempt: Attempt, outcome: str, result: Any = None) -> None:
        """An attempt has ended: free its room and start waiting calls."""
        worker, pending = attempt.worker, attempt.pending
        worker.in_flight.pop(attempt.number, None)
        self._changed(worker)
        if pending.attempts:  # not after ``close``
            pending.attempts.remove(attempt)
        pending.place.ended(worker.name, result)
        span = attempt.start, self.clock()
        answered = getattr(result, "version", None), getattr(result, "phases", {})
        event = Event(pending.service, worker.name, *span, outcome, pending.caller, *answered)
        worker.recent.append(event)
        if self.on_event is not None:
            self.on_event(event)
        self._pump_all(worker)

    def _fail(self, attempt: Attempt, fault: Fault, blamed: bool = True) -> None:
        """An attempt has failed. blamed: whether that counts against its worker."""
        pending, infrastructure = attempt.pending, isinstance(fault, InfrastructureFault)
        if blamed:
            attempt.worker.breaker.record(not infrastructure, self.clock())
        self._finish(attempt, fault.kind)
        if pending.done.done():
            return
        whose, refused = f"{attempt.worker.key}/{attempt.worker.name}", isinstance(fault, Refused)
        if not refused or whose not in self._told:
            self._report(pending, fault)
        if not infrastructure:
            pending.settle(fault)
            return
        pending.last_fault = fault
        pending.failed_on |= {attempt.worker.name}
        if refused:
            self._told.add(whose)
            self.counters["refused_answers"] += 1
        if pending.attempts or pending.waiting:
            return  # it is hedged
        others = refused and {w.name for w in self.workers(pending.service)} - pending.failed_on
        spent = pending.tries >= self.config.max_attempts and not others
        if spent or pending.worker is not None:
            self.counters["failed"] += 1
            pending.settle(DataFault(str(fault)) if refused else fault)
            return
        self.counters["retries"] += 1
        pending.waiting, seconds = True, backoff(pending.tries, self._rng)
        asyncio.get_running_loop().call_later(seconds, self._again, pending)

    def _again(self, pending: Pending) -> None:
        if self.clock() >= pending.deadline:
            self._expire(pending, pending.deadline - pending.since)
        elif not pending.done.done():
            self._queue(pending)

    def _expire(self, pending: Pending, deadline: float, answer: str = "did not answer") -> None:
        if pending.done.done():
            return
        self.counters["timeouts"] += 1
        now, attempts = self.clock(), pending.attempts
        before = f"; the attempt before failed: {pending.last_fault}" if pending.last_fault else ""
        if attempts:
            names = " and ".join(attempt.worker.name for attempt in attempts)
            where = f"on {names}, which {answer}"
            for attempt in attempts:
                attempt.worker.breaker.record(False, now)
                attempt.worker.expires(attempt, now)
        else:
            states = [f"{w.name} {w.state(now)}" for w in self.workers(pending.service)]
            shown = [*states[:_TOLD], *["..."] * (len(states) > _TOLD)]
            where = f"with no free worker: {', '.join(shown) or 'none offers it'}"
        fault = InfrastructureFault(f"{pending.service} took over {deadline:.1f} s {where}{before}")
        self._report(pending, fault)
        pending.settle(fault)
        _forget(self._waiting[pending.service], pending)
        self._abandon(pending, "deadline")

    def _report(self, pending: Pending, fault: Fault) -> None:
        if self.on_fault is not None and pending.caller:
            log.warning("%s, called by %s: %s", pending.service, pending.caller, fault)
            self.on_fault(pending.service, fault, pending.caller)

    def _abandon(self, pending: Pending, outcome: str) -> None:
        """The caller has left: cancel the attempts that are still running."""
        for attempt in list(pending.attempts):
            if attempt.late and outcome == "cancelled" and not pending.done.cancelled():
                attempt.worker.stalls(attempt, self.clock())
            self.roster.send(attempt.worker, wire.Cancel(attempt.number))
            self._finish(attempt, outcome)

    def _receive(self, parts: list[Frame]) -> None:
        try:
            self._handle(bytes(parts[0]), parts[1:])
        except WireError as error:
            self.roster.drop_malformed(bytes(parts[0]), error)

    def _handle(self, identity: bytes, frames: Sequence[Frame]) -> None:
        header = arrays.decode_header(frames)
        worker = self.roster.by_identity.get(identity)
        if worker is not None and worker.key != self.router.sender:
            reason = "this connection belongs to a worker with another key"
            self.roster.refuse(identity, worker.name, reason)
            return
        if isinstance(header, wire.Register):
            self.roster.join(identity, header)
            return
        if worker is None:
            if not isinstance(header, wire.Goodbye):
                self.router.send([identity, *encode(wire.Goodbye(REGISTER_AGAIN))])
            return
        worker.heard, worker.quiet = self.clock(), False
        match header:
            case wire.Result(id=number) | wire.Error(id=number):
                self._answer(worker, number, header, frames)
            case wire.Heartbeat(stats=stats, open=listed, echo=echo):
                worker.stats, worker.beat_at = stats, worker.heard
                self._compare(worker, set(listed), echo)
                self.roster.beat(worker)
                if worker.left_out:  # a rested worker may be usable again
                    self._changed(worker)
                self._pump_all(worker)
            case wire.Drain():
                worker.draining = True
            case wire.Goodbye(reason=reason):
                self.roster.leave(worker, bounds.said(reason) or "left")
            case _:
                kind = type(header).__name__
                raise WireError(f"{worker.name} sent a {kind}, which only a scheduler sends")

    def _compare(self, worker: Worker, listed: set[int], echo: int) -> None:
        """Fail attempts sent before an echo and not open there: they or their answers were lost."""
        lost = f"{worker.name} does not know of the call: it or its answer was lost"
        for attempt in list(worker.in_flight.values()):
            if attempt.number < echo and attempt.number not in listed:
                self.counters["lost_calls"] += 1
                # a connection loses all open calls at once, and the worker is well
                self._fail(attempt, InfrastructureFault(lost), blamed=False)

    def _answer(
        self, worker: Worker, number: int, header: wire.Result | wire.Error, frames: Sequence[Frame]
    ) -> None:
        if (attempt := worker.in_flight.get(number)) is None:
            self.counters["late_answers"] += 1
            return
        pending = attempt.pending
        if isinstance(header, wire.Error):
            # a fault of the data is told as such whenever it comes
            if header.kind == "infrastructure":
                # the worker gave it up there, before this process has looked
                if self.clock() >= pending.deadline:
                    seconds = pending.deadline - pending.since
                    self._expire(pending, seconds, f"answered: {bounds.said(header.message)}")
                    return
                if (now := self.clock()) > pending.deadline - _AT_DEADLINE_S:
                    worker.expires(attempt, now)
            message = f"{worker.name}: {bounds.said(header.message)}"
            self._fail(attempt, FAULTS[header.kind](message))
            return
        body = arrays.decode_body(frames, pending.result_type)
        try:
            if pending.check is not None:
                pending.check(body)
            bounds.check(body, self.router.grant(worker.key), self.declared.get(pending.service))
        except InfrastructureFault as fault:
            self._fail(attempt, type(fault)(f"{worker.name} answered {fault}"))
            return
        worker.breaker.record(True, now := self.clock())
        worker.answers(now)
        if pending.service.split(".", 1)[0] in wire.REPEATABLE:
            self._latencies[pending.service].record(now - attempt.start)
        pending.settle(body)
        self._finish(attempt, "ok", body)

    async def _look_for_late(self) -> None:
        while True:
            due = self.clock() + _LOOK_FOR_LATE_S
            await asyncio.sleep(_LOOK_FOR_LATE_S)
            # what came while this process was held up is not read yet
            for attempt in self._late(min(due, self.clock())):
                self._hedge(attempt)

    def _late(self, now: float) -> list[Attempt]:
        """The attempts that have become late."""
        late: list[Attempt] = []
        for worker in self.roster.by_identity.values():
            for attempt in worker.in_flight.values():
                if (seconds := now - attempt.start) < calls.FLOOR_S:
                    break  # those behind it are younger
                if seconds > self._latencies[attempt.pending.service].limit and not attempt.late:
                    late.append(attempt)
        return late

    def _hedge(self, attempt: Attempt) -> None:
        """Have a late attempt's call run on another worker, too, if it may."""
        attempt.late, pending = True, attempt.pending
        self.counters["late_attempts"] += 1
        if pending.done.done() or pending.waiting or pending.worker is not None:
            return
        avoided = pending.failed_on | {attempt.worker.name}
        others = any(worker.name not in avoided for worker in self.workers(pending.service))
        if others and pending.tries < self.config.max_attempts:
            self.counters["hedged"] += 1
            pending.failed_on = avoided
            self._queue(pending)

    def _pump_all(self, worker: Worker) -> None:
        for service in worker.hello.services:
            self.look_again(service)

    def _fail_all(self, worker: Worker, reason: str) -> None:
        for attempt in list(worker.in_flight.values()):
            self._fail(attempt, InfrastructureFault(f"{worker.name} is gone: {reason}"))
