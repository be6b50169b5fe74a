"""Every dispatched call reaches exactly one outcome: a result, a classified fault, or its caller's cancellation.

Every service is called by ``await dispatcher.call(service, request, deadline=...)``. Calls wait for a worker with room, first in, first
out, unless their ``Place`` orders them otherwise. After an infrastructure fault or the death of a worker the call moves to another
worker. The deadline covers all attempts together. Late answers are only counted.

States of a call: waiting -> running -> (fault -> backoff -> waiting)* -> done.
States of a worker: joining (on_join runs) -> ready <-> resting (breaker) -> draining -> gone.
"""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from scheduler.calls import Attempt, Check, DispatchConfig, Event, Pending, Worker
from scheduler.deadlines import Deadlines
from scheduler.placement import Place, backoff
from scheduler.pool import Pool, Queue
from wire.arrays import Frame, Limits, decode_body, decode_header, encode, encode_body, encode_header
from wire.faults import FAULTS, Fault, InfrastructureFault, WireError
from wire.keys import Grant, RunKeys
from wire.messages import (
    Cancel,
    Drain,
    Error,
    Goodbye,
    Heartbeat,
    Message,
    Register,
    Registered,
    Request,
    Result,
)
from wire.service import REGISTER_AGAIN, service_types
from wire.sockets import Router

__all__ = ["DispatchConfig", "Dispatcher", "Event", "Worker"]

log = logging.getLogger("scheduler.dispatch")

JoinHook = Callable[[Worker], Awaitable[None]]


class Transport(Protocol):
    """What the dispatcher needs of its socket: ``wire.sockets.Router``, or the simulated network of tests/simulation."""

    endpoint: str
    keys: RunKeys | None
    sender: str

    def grant(self, public: str) -> Grant | None: ...

    def listen(self, deliver: Callable[[list[Frame]], None]) -> asyncio.Future[None]: ...

    def send(self, frames: Iterable[Frame]) -> None: ...

    def close(self) -> None: ...


_LOOK_AHEAD = 64
"""At most so many calls at the head of a queue are passed over (each waits for a certain worker) before those behind wait too."""
_AT_DEADLINE_S = 1.0
"""An error so shortly before the deadline of its call means that the worker gave the call up at the deadline, a moment before this process."""
_TOLD = 8
"""At most so many workers are named in the message of a call that found none."""
_LOOK_AGAIN_S = 0.05
"""Seconds until held-back calls are tried again although nothing happened, while workers have room."""


def _order(pending: Pending) -> tuple[Any, ...]:
    """The sorting key of a waiting call: retried calls come first, then the ranks of their places decide, then the order of arrival."""
    return (not pending.failed_on, *(pending.place.rank() if pending.place is not None else ()), pending.arrival)


class Dispatcher:
    """Owns the ROUTER socket, the workers and the calls, from ``start`` to ``close``. A run of one call:

        dispatcher = Dispatcher("tcp://127.0.0.1:0", keys)
        await dispatcher.start()
        await dispatcher.wait_for("retrieve", 1, timeout=60)
        result = await dispatcher.call("retrieve", RetrieveRequest(["capital of Peru"], 3), deadline=30)
        await dispatcher.close()
    counters: calls, retries, timeouts, failed, late_answers, malformed_peers, refused_peers, dead_workers, lost_calls. on_fault(service, fault,
    caller). router, clock: the bound socket and the seconds that a simulation replaces.
    """

    def __init__(
        self,
        bind: str,
        keys: RunKeys | None,
        config: DispatchConfig = DispatchConfig(),
        seed: int = 0,
        router: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.router, self.clock = router or Router(bind, keys), clock
        self.endpoint = self.router.endpoint
        self.config = config
        self.counters: Counter[str] = Counter()
        self.on_join: JoinHook | None = None
        self.on_leave: Callable[[Worker, str], None] | None = None
        self.on_event: Callable[[Event], None] | None = None
        self.on_fault: Callable[[str, Fault, str], None] | None = None
        self._rng = random.Random(seed)
        # A worker may outlive this scheduler and answer the next one with an old number, so no two schedulers may share numbers.
        self._numbers = itertools.count(time.time_ns())
        self._workers: dict[bytes, Worker] = {}
        self._named: dict[str, Worker] = {}
        self._pools: defaultdict[str, Pool] = defaultdict(Pool)
        self._open: set[Pending] = set()
        self._deadlines = Deadlines(self._expire)
        self._waiting: defaultdict[str, Queue] = defaultdict(Queue)
        self._arrivals = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again_at: dict[str, asyncio.TimerHandle] = {}
        self._joined = asyncio.Event()
        self._limits = Limits()
        self._failure: BaseException | None = None
        self._draining = self._closed = False

    # ------------------------------------------------------------------------------------------ callers

    async def start(self) -> None:
        """Start to receive messages and to watch for dead workers."""
        self.router.listen(self._receive).add_done_callback(self._ended)
        self._spawn(self._watch())

    async def call(
        self,
        service: str,
        request: msgspec.Struct,
        *,
        deadline: float,
        place: Place | None = None,
        worker: str | None = None,
        caller: str = "",
        check: Check | None = None,
    ) -> Any:
        """Run ``request`` on a worker that offers ``service`` and return its result struct.

        deadline: seconds for the whole call, including waiting and retries. place: chooses the worker and is told of every attempt;
        without a place, the least loaded worker is used. worker: if named, the call goes to this worker only, at once, once, even if
        the worker is full. caller: words that ``on_fault`` gets; without them ``on_fault`` is not called. check: an answer
        that it refuses counts as an infrastructure fault of its worker.

        Raises InfrastructureFault when the deadline passed, ``max_attempts`` attempts failed or the named ``worker`` is gone; DataFault
        as the worker reported it; WireError when ``request`` cannot be sent.
        """
        if self._closed:
            raise InfrastructureFault(f"{service} was called after the dispatcher was closed")
        since, result_type = self.clock(), service_types(service)[1]
        pending = Pending(
            service, encode_body(request), result_type, since + deadline, place, worker, caller, since, check
        )
        self.counters["calls"] += 1
        self._open.add(pending)
        moment = self._deadlines.add(pending, deadline)
        try:
            self._enter(pending)
            return await pending.done
        finally:
            self._deadlines.discard(pending, moment)
            self._open.discard(pending)
            self._abandon(pending, "cancelled")
            if pending.done.cancelled():
                self._waiting[pending.service].forget(pending)
            # The future holds the error, whose traceback holds this frame: without this, a cycle with the whole request in it.
            del pending

    def workers(self, service: str | None = None) -> list[Worker]:
        """The ready workers that offer ``service``, or all ready workers."""
        if service is not None:
            return list(self._pools[service].members.values()) if service in self._pools else []
        return [w for w in self._workers.values() if w.ready]

    async def wait_for(self, service: str, count: int, timeout: float) -> None:
        """Wait until ``count`` workers offer ``service``. Raises TimeoutError that says how many came."""
        end = self.clock() + timeout
        while len(self._pools[service].members) < count:
            self._joined.clear()
            try:
                async with asyncio.timeout(max(0.0, end - self.clock())):
                    await self._joined.wait()
            except TimeoutError:
                raise TimeoutError(
                    f"{len(self.workers(service))} of {count} workers for service {service!r} came within {timeout:.0f} s:"
                    " see their logs in the run folder"
                ) from None

    def waiting(self) -> dict[str, int]:
        """The number of open calls per service, waiting and running ones; the watchdog prints it."""
        return dict(Counter(pending.service for pending in self._open))

    def open_calls(self) -> Collection[Pending]:
        """All calls that have no outcome yet."""
        return self._open

    def everyone(self) -> Collection[Worker]:
        """All workers that are here, including those that are joining."""
        return self._workers.values()

    def look_again(self, service: str) -> None:
        """Try the waiting calls of ``service`` again, because something that held them back has changed."""
        self._pump(service)

    async def drain(self) -> None:
        """Ask every worker to finish its calls and leave, also those that join from now on."""
        self._draining = True
        for worker in self._workers.values():
            self._send(worker, Drain())

    async def close(self) -> None:
        """Stop. Calls that are still open fail with InfrastructureFault."""
        self._closed = True
        for timer in self._again_at.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pending in list(self._open):
            pending.attempt = None
            pending.settle(InfrastructureFault("the dispatcher was closed"))
        for by_name in (self._waiting, self._workers, self._named, self._pools):
            by_name.clear()
        self.router.close()

    def remove(self, worker: Worker, reason: str) -> None:
        """Send a worker away. Its calls move to other workers."""
        self._send(worker, Goodbye(reason))
        self._leave(worker, reason)

    def failure(self) -> BaseException | None:
        """The error that ended the receive or watch loop, if one did."""
        return self._failure

    # ------------------------------------------------------------------------------------------ calls

    def _enter(self, pending: Pending) -> None:
        """Start a call, or put it in the queue."""
        if pending.worker is not None:
            # A call pinned to a worker never waits: new weights must reach an actor that is still joining or that is full.
            pinned = self._named.get(pending.worker)
            if pinned is None:
                self.counters["failed"] += 1
                known = sorted(self._named)
                pending.settle(
                    InfrastructureFault(f"{pending.service}: no worker {pending.worker!r} is here, only {known}")
                )
            else:
                self._start(pending, pinned)
            return
        self._queue(pending)

    def _queue(self, pending: Pending) -> None:
        pending.arrival = next(self._arrivals)
        pending.order = _order(pending)
        self._waiting[pending.service].add(pending)
        self._pump(pending.service)

    def _pump(self, service: str) -> None:
        """Start waiting calls of ``service`` while a worker has room."""
        queue = self._waiting.get(service)
        if not queue:
            return
        pool, now, refused, passed = self._pools[service], self.clock(), set(), 0
        while passed < min(len(queue), _LOOK_AHEAD) and (least := pool.least(now)) is not None:
            pending = queue[passed]
            kind = pending.place.waits_with() if pending.place is not None else None
            if pending.done.done():
                queue.take(passed)  # its caller was cancelled and has not run since
            elif kind in refused or (worker := self._place(pending, pool, least, now)) is None:
                refused |= {kind} - {None}
                passed += 1
            else:
                queue.take(passed)
                self._start(pending, worker)
                if pending.place is not None:
                    self._reorder(queue, passed)
        if passed and any(queue[at].place is not None for at in range(passed)) and pool.least(now) is not None:
            self._pump_later(service)

    def _reorder(self, queue: Queue, at: int) -> None:
        """Move the calls from ``at`` on whose ranks have changed. They are calls of one tree, which has just begun, and stand side by side."""
        while at < len(queue) and (order := _order(queue[at])) != queue[at].order:
            moved = queue.take(at)
            moved.order = order
            queue.add(moved)

    def _pump_later(self, service: str) -> None:
        def pump() -> None:
            del self._again_at[service]
            self._pump(service)

        if service not in self._again_at:
            self._again_at[service] = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, pump)

    def _place(self, pending: Pending, pool: Pool, least: Worker, now: float) -> Worker | None:
        if pending.place is None:
            return pool.least(now, pending.failed_on) if pending.failed_on else least
        name = pending.place.choose(pool.loads(now, pending.place.homes(), pending.failed_on), pending.failed_on)
        return pool.members.get(name) if name is not None else None

    def _changed(self, worker: Worker) -> None:
        """The load or the state of a worker has changed."""
        worker.left_out = False
        for service in worker.hello.services:
            self._pools[service].touch(worker)

    def _start(self, pending: Pending, worker: Worker) -> None:
        now = self.clock()
        number = next(self._numbers)
        pending.tries += 1
        pending.attempt = worker.in_flight[number] = Attempt(number, pending, worker, now)
        self._changed(worker)
        header = encode_header(Request(number, pending.service, max(0.001, pending.deadline - now)))
        self.router.send([worker.identity, header, *pending.body])
        if pending.place is not None:
            pending.place.started(worker.name)

    def _finish(self, attempt: Attempt, outcome: str, result: Any = None) -> None:
        """An attempt has ended with any outcome: free its room and start waiting calls."""
        worker, pending = attempt.worker, attempt.pending
        worker.in_flight.pop(attempt.number, None)
        self._changed(worker)
        pending.attempt = None
        if pending.place is not None:
            pending.place.ended(worker.name, result)
        version = getattr(result, "version", None)
        phases = getattr(result, "phases", {})
        event = Event(
            pending.service, worker.name, attempt.start, self.clock(), outcome, pending.caller, version, phases
        )
        worker.recent.append(event)
        if self.on_event is not None:
            self.on_event(event)
        self._pump_all(worker)

    def _fail(self, attempt: Attempt, fault: Fault, blamed: bool = True) -> None:
        """An attempt has failed. blamed: whether that counts against its worker, which rests after several failures in a row."""
        pending, infrastructure = attempt.pending, isinstance(fault, InfrastructureFault)
        if blamed:
            attempt.worker.breaker.record(not infrastructure, now := self.clock())
            self._wake_after_rest(attempt.worker, now)
        self._finish(attempt, fault.kind)
        if pending.done.done():
            return
        self._tell(pending, fault)
        if not infrastructure:
            pending.settle(fault)
            return
        pending.last_fault = fault
        pending.failed_on |= {attempt.worker.name}
        if pending.tries >= self.config.max_attempts or pending.worker is not None:
            self.counters["failed"] += 1
            pending.settle(fault)
            return
        self.counters["retries"] += 1
        asyncio.get_running_loop().call_later(backoff(pending.tries, self._rng), self._again, pending)

    def _wake_after_rest(self, worker: Worker, now: float) -> None:
        """If the worker rests from now on, look at the waiting calls when its rest is over."""

        def wake() -> None:
            if self._workers.get(worker.identity) is worker:
                self._changed(worker)
                self._pump_all(worker)

        if not worker.breaker.closed(now):
            asyncio.get_running_loop().call_later(worker.breaker.open_until - now, wake)

    def _again(self, pending: Pending) -> None:
        if not pending.done.done():
            self._queue(pending)

    def _expire(self, pending: Pending, deadline: float) -> None:
        if pending.done.done():
            return
        self.counters["timeouts"] += 1
        now, attempt = self.clock(), pending.attempt
        here = self.workers(pending.service)
        states = ", ".join(f"{worker.name} {worker.state(now)}" for worker in here[:_TOLD])
        states += f" and {len(here) - _TOLD} more" if len(here) > _TOLD else ""
        where = (
            f"on {attempt.worker.name}, which did not answer"
            if attempt
            else f"with no free worker: {states or 'none offers it'}"
        )
        before = f"; the attempt before failed: {pending.last_fault}" if pending.last_fault else ""
        if attempt:
            attempt.worker.breaker.record(False, now)
            self._wake_after_rest(attempt.worker, now)
            attempt.worker.expires(attempt)
        fault = InfrastructureFault(f"{pending.service} took over {deadline:.1f} s {where}{before}")
        self._tell(pending, fault)
        pending.settle(fault)
        self._waiting[pending.service].forget(pending)
        self._abandon(pending, "deadline")

    def _tell(self, pending: Pending, fault: Fault) -> None:
        """Report every fault, including those of attempts that are retried."""
        if self.on_fault is not None and pending.caller:
            log.warning("%s, called by %s: %s", pending.service, pending.caller, fault)
            self.on_fault(pending.service, fault, pending.caller)

    def _abandon(self, pending: Pending, outcome: str) -> None:
        """The caller has left: cancel the attempt that is still running, if there is one."""
        if (attempt := pending.attempt) is not None:
            self._send(attempt.worker, Cancel(attempt.number))
            self._finish(attempt, outcome)

    # ------------------------------------------------------------------------------------------ workers

    def _send(self, worker: Worker, header: Message) -> None:
        if not self._closed:
            self.router.send([worker.identity, *encode(header)])

    def _receive(self, parts: list[Frame]) -> None:
        identity, frames = bytes(parts[0]), parts[1:]
        try:
            self._handle(identity, frames)
        except WireError as error:
            self._drop_malformed(identity, error)

    def _handle(self, identity: bytes, frames: Sequence[Frame]) -> None:
        header = decode_header(frames, self._limits)
        worker = self._workers.get(identity)
        if worker is not None and worker.key != self.router.sender:
            self._refuse(identity, worker.name, "this connection belongs to a worker with another key")
            return
        if isinstance(header, Register):
            self._join(identity, header)
            return
        if worker is None:
            if not isinstance(header, Goodbye):
                self.router.send([identity, *encode(Goodbye(REGISTER_AGAIN))])
            return
        worker.heard = self.clock()
        match header:
            case Result(id=number) | Error(id=number):
                self._answer(worker, number, header, frames)
            case Heartbeat(stats=stats, open=listed, echo=echo):
                worker.stats, worker.beat_at = stats, worker.heard
                self._compare(worker, set(listed), echo)
                self._send(worker, Heartbeat(len(worker.in_flight), {}, echo=next(self._numbers)))
                if worker.left_out:  # a rested worker may be usable again
                    self._changed(worker)
                self._pump_all(worker)
            case Drain():
                worker.draining = True
            case Goodbye(reason=reason):
                self._leave(worker, reason or "left")
            case _:
                raise WireError(f"{worker.name} sent a {type(header).__name__}, which only a scheduler sends")

    def _compare(self, worker: Worker, listed: set[int], echo: int) -> None:
        """Fail the attempts that were sent before an echo that has arrived, and that are not open there: a connection lost them or their
        answers, and nothing else would tell."""
        for attempt in [a for a in worker.in_flight.values() if a.number < echo and a.number not in listed]:
            self.counters["lost_calls"] += 1
            lost = InfrastructureFault(f"{worker.name} does not know of the call: it or its answer was lost")
            self._fail(attempt, lost, blamed=False)  # a connection loses all open calls at once, and the worker is well

    def _answer(self, worker: Worker, number: int, header: Result | Error, frames: Sequence[Frame]) -> None:
        attempt = worker.in_flight.get(number)
        if attempt is None:
            self.counters["late_answers"] += 1
            return
        pending = attempt.pending
        if isinstance(header, Error):
            if self.clock() > pending.deadline - _AT_DEADLINE_S:
                worker.expires(attempt)
            self._fail(attempt, FAULTS[header.kind](f"{worker.name}: {header.message}"))
            return
        body = decode_body(frames, pending.result_type)
        try:
            if pending.check is not None:
                pending.check(body)
        except InfrastructureFault as fault:
            self._fail(attempt, InfrastructureFault(f"{worker.name} answered {fault}"))
            return
        worker.breaker.record(True, now := self.clock())
        worker.answers(now)
        pending.settle(body)
        self._finish(attempt, "ok", body)

    def _drop_malformed(self, identity: bytes, error: WireError) -> None:
        self.counters["malformed_peers"] += 1
        worker = self._workers.get(identity)
        if worker is not None and worker.key != self.router.sender:
            worker = None  # somebody else sent it in this worker's name
        log.error("dropped peer %s: %s", worker.name if worker else identity[:40], error)
        reason = f"sent a malformed message: {error}"
        if worker is not None:
            self.remove(worker, reason)
        else:
            self.router.send([identity, *encode(Goodbye(reason))])

    def _join(self, identity: bytes, hello: Register) -> None:
        if (worker := self._workers.get(identity)) is not None:
            worker.heard = self.clock()
            self._send(worker, Registered(self.config.heartbeat_s, worker.admission))
            return
        for service in hello.services:
            service_types(service)
        if (reason := self._forbidden(hello)) is not None:
            self._refuse(identity, hello.worker, reason)
            return
        if hello.protocol != 1 or hello.capacity < 1:
            raise WireError(
                f"{hello.worker} registers with protocol {hello.protocol}, capacity {hello.capacity}: expected 1 and at least 1"
            )
        if (old := self._named.get(hello.worker)) is not None:
            self.remove(old, f"replaced by a new process of the same name {old.name}")
        worker = Worker(identity, hello, self.clock(), f"{next(self._numbers):x}", self.router.sender)
        worker.joined = next(self._arrivals)
        self._workers[identity] = self._named[worker.name] = worker
        self._send(worker, Registered(self.config.heartbeat_s, worker.admission))
        if self._draining:
            self._send(worker, Drain())
        self._spawn(self._admit(worker))

    def _forbidden(self, hello: Register) -> str | None:
        """Return why the sender's key may not register so, None if it may. The same key may take its name again (a restarted worker)."""
        grant = self.router.grant(self.router.sender)
        if grant is None:
            return "its key was revoked: ask for a new invitation (tools/serve --invite)"
        if extra := [service for service in hello.services if not grant.allows(service)]:
            return f"its key may offer {', '.join(grant.services)}, and not {', '.join(extra)}"
        if (other := self._named.get(hello.worker)) is not None and other.key != self.router.sender:
            return "a worker of this name is alive and has another key: choose another name (tools/serve --name)"
        return None

    def _refuse(self, identity: bytes, name: str, reason: str) -> None:
        self.counters["refused_peers"] += 1
        log.error("refused a peer that calls itself %r: %s", name[:100], reason)
        self.router.send([identity, *encode(Goodbye(f"refused: {reason}"))])

    async def _admit(self, worker: Worker) -> None:
        """Admit a worker once ``on_join`` has returned (in it, an actor loads the current weights)."""
        if self.on_join is not None:
            try:
                await self.on_join(worker)
            except Fault as fault:
                log.error("worker %s could not join: %s", worker.name, fault)
                self.remove(worker, f"could not join: {fault}")
                return
        if self._workers.get(worker.identity) is worker:
            worker.ready = True
            for service in worker.hello.services:
                self._pools[service].add(worker)
            self._joined.set()
            self._pump_all(worker)

    def _pump_all(self, worker: Worker) -> None:
        for service in worker.hello.services:
            self._pump(service)

    def _leave(self, worker: Worker, reason: str) -> None:
        if self._workers.get(worker.identity) is not worker:
            return  # gone already
        del self._workers[worker.identity], self._named[worker.name]
        worker.ready = False
        for service in worker.hello.services:
            self._pools[service].discard(worker)
        for attempt in list(worker.in_flight.values()):
            self._fail(attempt, InfrastructureFault(f"{worker.name} is gone: {reason}"))
        if self.on_leave is not None:
            self.on_leave(worker, reason)

    async def _watch(self) -> None:
        """Give up every worker that has been silent for more than ``dead_after_s``."""
        while True:
            before = self.clock()
            await asyncio.sleep(self.config.heartbeat_s)
            now = self.clock()
            if now - before > 2 * self.config.heartbeat_s:
                continue  # this process itself was held up, so the heartbeats that arrived meanwhile are not read yet
            self._send_away_revoked()
            for worker in [w for w in self._workers.values() if now - w.heard > self.config.dead_after_s]:
                self.counters["dead_workers"] += 1
                self._leave(worker, f"silent for {now - worker.heard:.0f} s")

    def _send_away_revoked(self) -> None:
        if self.router.keys is not None:
            self.router.keys.reload()
        for worker in [w for w in self._workers.values() if self.router.grant(w.key) is None]:
            self.remove(worker, "its key was revoked")

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            log.error("a dispatcher task died", exc_info=error)
