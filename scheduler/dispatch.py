"""Every dispatched call reaches exactly one outcome: a result, a classified fault, or its caller's cancellation.

One ``await dispatcher.call(service, request, deadline=...)`` for every service. Calls wait first in, first out for a worker
with room; infrastructure faults, deadlines and deaths of workers move a call to another worker; late answers are counted.

States of a call: waiting -> running -> (fault -> backoff -> waiting)* -> done.
States of a worker: joining (on_join runs) -> ready <-> resting (breaker) -> draining -> gone.
"""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from scheduler.placement import Breaker, Load, backoff, choose
from wire.arrays import Limits, decode_body, decode_header, encode
from wire.faults import FAULTS, Fault, InfrastructureFault, WireError
from wire.messages import (
    Cancel,
    Drain,
    Error,
    Goodbye,
    Heartbeat,
    Partial,
    Register,
    Registered,
    Request,
    Result,
)
from wire.service import service_types
from wire.sockets import Router, RunKeys

log = logging.getLogger("scheduler.dispatch")


class DispatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timing of workers and calls, in seconds."""

    heartbeat_s: float = 2.0
    dead_after_s: float = 20.0
    """Silence after which a worker is given up and its calls move on. Well above a long pause of a busy machine."""
    max_attempts: int = 3
    hedge_after_s: float = 0.0
    """Start a second attempt elsewhere when the first takes longer; 0 switches hedging off."""


class Event(msgspec.Struct, frozen=True):
    """One attempt of one call, for traces. Times are seconds of the monotonic clock."""

    service: str
    worker: str
    start: float
    end: float
    outcome: str


class Worker:
    """What the dispatcher knows of one connected worker."""

    def __init__(self, identity: bytes, hello: Register, now: float):
        self.identity, self.hello = identity, hello
        self.name = hello.worker
        self.in_flight: dict[int, Attempt] = {}
        self.stats: dict[str, float] = {}
        self.breaker = Breaker()
        self.heard = now
        self.ready = False
        self.draining = False


class Pending:
    """A call and its waiting caller."""

    def __init__(self, service: str, request: msgspec.Struct, deadline: float, prefer: str | None, worker: str | None):
        self.service, self.request, self.prefer, self.worker = service, request, prefer, worker
        self.deadline = deadline
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.failed_on: frozenset[str] = frozenset()
        self.attempts: dict[int, Attempt] = {}
        self.tries = 0
        self.last_fault: Fault | None = None
        self.on_partial: Callable[[Any], None] | None = None
        self.served_by: Callable[[str], None] | None = None


class Attempt:
    """One try of a pending call on one worker."""

    def __init__(self, number: int, pending: Pending, worker: Worker, start: float):
        self.number, self.pending, self.worker, self.start = number, pending, worker, start


JoinHook = Callable[[Worker], Awaitable[None]]


class Dispatcher:
    """Owns the ROUTER socket, the workers and the calls. Start with ``await start()``, end with ``await close()``."""

    def __init__(self, bind: str, keys: RunKeys | None, config: DispatchConfig = DispatchConfig(), seed: int = 0):
        self.router = Router(bind, keys)
        self.endpoint = self.router.endpoint
        self.config = config
        self.counters: Counter[str] = Counter()
        self.on_join: JoinHook | None = None
        self.on_leave: Callable[[Worker, str], None] | None = None
        self.on_event: Callable[[Event], None] | None = None
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)
        self._workers: dict[bytes, Worker] = {}
        self._attempts: dict[int, Attempt] = {}
        self._waiting: dict[str, deque[Pending]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._limits = Limits()

    # ------------------------------------------------------------------------------------------ callers

    async def start(self) -> None:
        """Begin to receive and to watch for dead workers."""
        self._spawn(self._receive())
        self._spawn(self._watch())

    async def call(
        self,
        service: str,
        request: msgspec.Struct,
        *,
        deadline: float,
        prefer: str | None = None,
        worker: str | None = None,
        on_partial: Callable[[Any], None] | None = None,
        served_by: Callable[[str], None] | None = None,
    ) -> Any:
        """Run ``request`` on a worker that offers ``service`` and return its result struct.

        deadline: seconds for the whole call, retries included. prefer: the worker to use unless it is overloaded;
        worker: the only worker to use; served_by is told the worker that answered. Raises the Fault that ended the call: InfrastructureFault when the deadline
        passed or ``max_attempts`` failed, DataFault or PolicyFault as the worker reported it.
        """
        pending = Pending(service, request, time.monotonic() + deadline, prefer, worker)
        pending.on_partial, pending.served_by = on_partial, served_by
        self.counters["calls"] += 1
        self._waiting.setdefault(service, deque()).append(pending)
        self._pump(service)
        timer = asyncio.get_running_loop().call_later(deadline, self._expire, pending, deadline)
        hedge = self.config.hedge_after_s
        hedging = asyncio.get_running_loop().call_later(hedge, self._hedge, pending) if hedge else None
        try:
            return await pending.done
        finally:
            timer.cancel()
            if hedging is not None:
                hedging.cancel()
            if pending.attempts:
                self._abandon(pending)
            if pending.done.cancelled():
                self._forget_waiting(pending)

    def workers(self, service: str | None = None) -> list[Worker]:
        """The ready workers, of one service or of all."""
        return [w for w in self._workers.values() if w.ready and (service is None or service in w.hello.services)]

    async def wait_for(self, service: str, count: int, timeout: float) -> None:
        """Wait until ``count`` workers offer ``service``; raises TimeoutError naming what is missing."""
        end = time.monotonic() + timeout
        while len(self.workers(service)) < count:
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"{len(self.workers(service))} of {count} workers for service {service!r} came within {timeout:.0f} s:"
                    " look at their logs in the run folder"
                ) from None

    def waiting(self) -> dict[str, int]:
        """Calls by service that wait for a worker or run on one (what a watchdog prints)."""
        running = Counter(attempt.pending.service for attempt in self._attempts.values())
        for service, queue in self._waiting.items():
            running[service] += len(queue)
        return {service: count for service, count in running.items() if count}

    async def drain(self) -> None:
        """Ask every worker to finish and leave."""
        for worker in self._workers.values():
            self._send(worker, Drain())

    async def close(self) -> None:
        """Stop; calls still open fail with InfrastructureFault."""
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        open_calls = {a.pending for a in self._attempts.values()} | {p for q in self._waiting.values() for p in q}
        for pending in open_calls:
            self._settle(pending, InfrastructureFault("the dispatcher was closed"))
        self.router.close()

    def failure(self) -> BaseException | None:
        """The error that ended the receive or watch loop, if one did."""
        return self._failure

    # ------------------------------------------------------------------------------------------ calls

    _failure: BaseException | None = None

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._failure = task.exception()
                log.error("a dispatcher task died", exc_info=task.exception())

        task.add_done_callback(ended)

    def _send(self, worker: Worker, header: Any, body: msgspec.Struct | None = None) -> None:
        self.router.socket.send_multipart([worker.identity, *encode(header, body)], copy=False)

    def _pump(self, service: str) -> None:
        """Start waiting calls of ``service`` while a worker has room."""
        queue = self._waiting.get(service)
        if not queue:
            return
        stuck: list[Pending] = []
        while queue:
            pending = queue.popleft()
            if pending.done.done():
                continue
            worker = self._place(pending)
            if worker is not None:
                self._start(pending, worker)
            elif pending.worker is None:
                queue.appendleft(pending)
                break
            else:
                stuck.append(pending)  # a pinned call must not hold up the others
        queue.extendleft(reversed(stuck))

    def _place(self, pending: Pending) -> Worker | None:
        now = time.monotonic()
        usable = {w.name: w for w in self.workers(pending.service) if not w.draining and w.breaker.closed(now)}
        if pending.worker is not None:
            # A pinned call (weights to one worker) goes through even when the worker is full.
            return usable.get(pending.worker) or next(
                (w for w in self._workers.values() if w.name == pending.worker), None
            )
        loads = [Load(w.name, len(w.in_flight), w.hello.capacity) for w in usable.values()]
        name = choose(loads, pending.prefer, pending.failed_on)
        return usable[name] if name is not None else None

    def _start(self, pending: Pending, worker: Worker) -> None:
        now = time.monotonic()
        attempt = Attempt(next(self._numbers), pending, worker, now)
        pending.tries += 1
        pending.attempts[attempt.number] = attempt
        worker.in_flight[attempt.number] = attempt
        self._attempts[attempt.number] = attempt
        left = max(0.001, pending.deadline - now)
        self._send(worker, Request(attempt.number, pending.service, left), pending.request)

    def _finish(self, attempt: Attempt, outcome: str) -> None:
        """An attempt is over, however it ended: free its room and start what waits."""
        self._attempts.pop(attempt.number, None)
        attempt.worker.in_flight.pop(attempt.number, None)
        attempt.pending.attempts.pop(attempt.number, None)
        if self.on_event is not None:
            self.on_event(Event(attempt.pending.service, attempt.worker.name, attempt.start, time.monotonic(), outcome))
        for service in attempt.worker.hello.services:
            self._pump(service)

    def _settle(self, pending: Pending, outcome: Any) -> None:
        if pending.done.done():
            return
        if isinstance(outcome, BaseException):
            pending.done.set_exception(outcome)
        else:
            pending.done.set_result(outcome)

    def _fail(self, attempt: Attempt, fault: Fault) -> None:
        pending = attempt.pending
        attempt.worker.breaker.record(not isinstance(fault, InfrastructureFault), time.monotonic())
        self._finish(attempt, fault.kind)
        if pending.done.done():
            return
        if not isinstance(fault, InfrastructureFault):
            self._settle(pending, fault)
            return
        pending.last_fault = fault
        pending.failed_on |= {attempt.worker.name}
        if pending.attempts:
            return  # a hedged twin still runs
        if pending.tries >= self.config.max_attempts or pending.worker is not None:
            self.counters["failed"] += 1
            self._settle(pending, fault)
            return
        self.counters["retries"] += 1
        asyncio.get_running_loop().call_later(backoff(pending.tries, self._rng), self._requeue, pending)

    def _requeue(self, pending: Pending) -> None:
        if not pending.done.done():
            self._waiting.setdefault(pending.service, deque()).appendleft(pending)
            self._pump(pending.service)

    def _expire(self, pending: Pending, deadline: float) -> None:
        if pending.done.done():
            return
        self.counters["timeouts"] += 1
        on = ", ".join(attempt.worker.name for attempt in pending.attempts.values())
        where = f"on {on}" if on else f"with no free worker ({len(self.workers(pending.service))} offer it)"
        before = f"; the attempt before failed: {pending.last_fault}" if pending.last_fault else ""
        for attempt in pending.attempts.values():
            attempt.worker.breaker.record(False, time.monotonic())
        self._settle(pending, InfrastructureFault(f"{pending.service} took over {deadline:.1f} s {where}{before}"))
        self._forget_waiting(pending)

    def _hedge(self, pending: Pending) -> None:
        if pending.done.done() or len(pending.attempts) != 1:
            return
        (running,) = pending.attempts.values()
        pending.failed_on |= {running.worker.name}
        worker = self._place(pending)
        if worker is not None and worker is not running.worker:
            self.counters["hedges"] += 1
            self._start(pending, worker)

    def _abandon(self, pending: Pending) -> None:
        """The caller is gone or served: stop every attempt that still runs."""
        for attempt in list(pending.attempts.values()):
            self._send(attempt.worker, Cancel(attempt.number))
            self._finish(attempt, "cancelled")

    def _forget_waiting(self, pending: Pending) -> None:
        queue = self._waiting.get(pending.service)
        if queue is not None and pending in queue:
            queue.remove(pending)

    # ------------------------------------------------------------------------------------------ workers

    async def _receive(self) -> None:
        while True:
            parts = await self.router.socket.recv_multipart(copy=False)
            identity, frames = parts[0].bytes, [part.buffer for part in parts[1:]]
            try:
                self._handle(identity, frames)
            except WireError as error:
                self._drop_malformed(identity, error)

    def _handle(self, identity: bytes, frames: Sequence[memoryview]) -> None:
        header = decode_header(frames, self._limits)
        worker = self._workers.get(identity)
        if isinstance(header, Register):
            self._join(identity, header)
            return
        if worker is None:
            if not isinstance(header, Goodbye):  # one we gave up: it registers anew
                self.router.socket.send_multipart([identity, *encode(Goodbye("register"))])
            return
        worker.heard = time.monotonic()
        match header:
            case Result(id=number) | Partial(id=number) | Error(id=number):
                self._answer(worker, number, header, frames)
            case Heartbeat(stats=stats):
                worker.stats = stats
                self._send(worker, Heartbeat(len(worker.in_flight), {}))
                self._pump_all(worker)
            case Drain():
                worker.draining = True
            case Goodbye(reason=reason):
                self._leave(worker, reason or "left")
            case _:
                raise WireError(f"{worker.name} sent a {type(header).__name__}, which only a scheduler sends")

    def _answer(self, worker: Worker, number: int, header: Any, frames: Sequence[memoryview]) -> None:
        attempt = worker.in_flight.get(number)
        if attempt is None:
            self.counters["late_answers"] += 1
            return
        pending = attempt.pending
        if isinstance(header, Error):
            self._fail(attempt, FAULTS[header.kind](f"{worker.name}: {header.message}"))
            return
        body = decode_body(frames, service_types(pending.service)[1])
        if isinstance(header, Partial):
            if pending.on_partial is not None and not pending.done.done():
                pending.on_partial(body)
            return
        worker.breaker.record(True, time.monotonic())
        if pending.served_by is not None:
            pending.served_by(worker.name)
        self._settle(pending, body)
        self._finish(attempt, "ok")

    def _drop_malformed(self, identity: bytes, error: WireError) -> None:
        self.counters["malformed_peers"] += 1
        worker = self._workers.get(identity)
        log.error("dropped peer %s: %s", worker.name if worker else identity[:40], error)
        self.router.socket.send_multipart([identity, *encode(Goodbye(f"malformed message: {error}"))])
        if worker is not None:
            self._leave(worker, f"sent a malformed message: {error}")

    def _join(self, identity: bytes, hello: Register) -> None:
        refusal = None
        if hello.protocol != 1:
            refusal = f"protocol {hello.protocol}, expected 1"
        elif hello.capacity < 1:
            refusal = f"capacity {hello.capacity}, expected at least 1"
        if refusal is not None:
            self.router.socket.send_multipart([identity, *encode(Goodbye(refusal))])
            return
        if identity in self._workers:
            self._send(self._workers[identity], Registered(self.config.heartbeat_s))
            return
        for old in [w for w in self._workers.values() if w.name == hello.worker]:
            self._leave(old, "replaced by a new process of the same name")
        worker = Worker(identity, hello, time.monotonic())
        self._workers[identity] = worker
        self._send(worker, Registered(self.config.heartbeat_s))
        self._spawn(self._admit(worker))

    async def _admit(self, worker: Worker) -> None:
        """A worker gets no work before ``on_join`` has returned (an actor loads the current weights in it)."""
        if self.on_join is not None:
            try:
                await self.on_join(worker)
            except Fault as fault:
                log.error("worker %s could not join: %s", worker.name, fault)
                self._send(worker, Goodbye(f"could not join: {fault}"))
                self._leave(worker, f"could not join: {fault}")
                return
        if worker.identity in self._workers:
            worker.ready = True
            self._joined.set()
            self._pump_all(worker)

    def _pump_all(self, worker: Worker) -> None:
        for service in worker.hello.services:
            self._pump(service)

    def remove(self, worker: Worker, reason: str) -> None:
        """Send a worker away; its calls move to others."""
        self._send(worker, Goodbye(reason))
        self._leave(worker, reason)

    def _leave(self, worker: Worker, reason: str) -> None:
        self._workers.pop(worker.identity, None)
        worker.ready = False
        for attempt in list(worker.in_flight.values()):
            self._fail(attempt, InfrastructureFault(f"{worker.name} is gone: {reason}"))
        if self.on_leave is not None:
            self.on_leave(worker, reason)

    async def _watch(self) -> None:
        """Give up workers that were silent for ``dead_after_s``."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self.config.heartbeat_s)
            now = time.monotonic()
            if now - before > 2 * self.config.heartbeat_s:
                continue  # this process was held up itself: what arrived meanwhile is not read yet
            for worker in [w for w in self._workers.values() if now - w.heard > self.config.dead_after_s]:
                self.counters["dead_workers"] += 1
                self._leave(worker, f"silent for {now - worker.heard:.0f} s")
