"""Which workers are here. States of one: joining (on_join runs) -> ready <-> resting (breaker) ->
draining -> gone. A ready worker is in the pool of each service that it offers."""

import asyncio
import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from coppice.scheduler.dispatch import bounds
from coppice.scheduler.dispatch.calls import DispatchConfig, Worker
from coppice.scheduler.dispatch.pool import Pool
from coppice.wire.arrays import encode
from coppice.wire.faults import Fault, InfrastructureFault, WireError
from coppice.wire.messages import Drain, Goodbye, Heartbeat, Message, Register, Registered
from coppice.wire.service import service_types
from coppice.wire.sockets import Router

log = logging.getLogger("scheduler.roster")

QUIET_BEATS = 2.5
"""A worker whose heartbeats stay away for so many times their interval gets no calls until it is
heard again."""
BACK_S = 0.5
"""Seconds in which a worker whose connection broke may be back: ZeroMQ tries again after 0.1."""


class Roster:
    """The workers and their socket. came, gone: told of admissions and departures. on_join: awaited
    before a worker's first call. numbers: of calls; a worker may answer the next scheduler with an
    old one, so no two schedulers share them. failure: of a background task."""

    on_join: Callable[[Worker], Awaitable[None]] | None = None
    on_leave: Callable[[Worker, str], None] | None = None
    failure: BaseException | None = None

    def __init__(
        self, router: Router, config: DispatchConfig, clock: Callable[[], float],
        counters: Counter[str], came: Callable[[Worker], None],
        gone: Callable[[Worker, str], None],
    ):  # fmt: skip
        self.router, self.config, self.clock, self.counters = router, config, clock, counters
        self.numbers = itertools.count(time.time_ns())
        self.pools: defaultdict[str, Pool] = defaultdict(Pool)
        self._came, self._gone = came, gone
        self._arrivals = itertools.count()
        self.by_identity: dict[bytes, Worker] = {}  # all that are here, also while they join
        self.by_name: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._calling: asyncio.TimerHandle | None = None
        self._joined = asyncio.Event()
        self._draining = self._closed = False

    def start(self) -> None:
        self.router.broken = self._broken
        self.spawn(self._watch())

    async def close(self) -> None:
        """Forget the workers and close the socket."""
        self._closed = True
        if self._calling is not None:
            self._calling.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for by_name in (self.by_identity, self.by_name, self.pools):
            by_name.clear()
        self.router.close()

    def workers(self, service: str | None = None) -> list[Worker]:
        """The ready workers that offer ``service``, or all ready workers."""
        if service is not None:
            return list(self.pools[service].members.values()) if service in self.pools else []
        return [w for w in self.by_identity.values() if w.ready]

    async def wait_for(self, service: str, count: int, timeout: float) -> None:
        """Wait until ``count`` workers offer ``service``. Raises InfrastructureFault."""
        end = self.clock() + timeout
        while len(self.pools[service].members) < count:
            self._joined.clear()
            try:
                async with asyncio.timeout(max(0.0, end - self.clock())):
                    await self._joined.wait()
            except TimeoutError:
                raise InfrastructureFault(
                    f"{len(self.workers(service))} of {count} workers for service {service!r} came"
                    f" within {timeout:.0f} s: see their logs in the run folder"
                ) from None

    async def drain(self) -> None:
        """Ask every worker to finish its calls and leave, also those that join from now on."""
        self._draining = True
        for worker in self.by_identity.values():
            self.send(worker, Drain())

    def remove(self, worker: Worker, reason: str) -> None:
        """Send a worker away. Its calls move to other workers."""
        self.send(worker, Goodbye(reason))
        self.leave(worker, reason)

    def send(self, worker: Worker, header: Message) -> bool:
        """Send a message without a body. Returns False if the worker has no connection now."""
        return self._closed or self.router.send([worker.identity, *encode(header)])

    def beat(self, worker: Worker) -> bool:
        """Send a heartbeat, as ``send`` does, whose echo is newer than every call before it."""
        return self.send(worker, Heartbeat(len(worker.in_flight), {}, echo=next(self.numbers)))

    def drop_malformed(self, identity: bytes, error: WireError) -> None:
        """Send away a peer that broke the protocol."""
        self.counters["malformed_peers"] += 1
        worker, reason = self.by_identity.get(identity), f"sent a malformed message: {error}"
        log.error("dropped peer %s: %s", worker.name if worker else identity[:40], error)
        if worker is not None and worker.key == self.router.sender:
            self.remove(worker, reason)
        else:  # unknown, or somebody sent it in the name of a worker
            self.router.send([identity, *encode(Goodbye(reason))])

    def join(self, identity: bytes, hello: Register) -> None:
        """Answer a registration. Raises WireError for one that this protocol does not have."""
        if (worker := self.by_identity.get(identity)) is not None:
            worker.heard = self.clock()
            self.send(worker, Registered(self.config.heartbeat_s, worker.admission))
            return
        if (reason := self._forbidden(hello)) is not None:
            self.refuse(identity, hello.worker, reason)
            return
        for service in hello.services:
            service_types(service)
        if hello.protocol != 1 or hello.capacity < 1:
            told = f"protocol {hello.protocol}, capacity {hello.capacity}"
            raise WireError(f"{hello.worker} registers with {told}: expected 1 and at least 1")
        if (old := self.by_name.get(hello.worker)) is not None:
            self.remove(old, f"replaced by a new process of the same name {old.name}")
        if (grant := self.router.grant(self.router.sender)) is not None and grant.guest:
            # the watchdog would take it for the process of the run that it names
            hello = msgspec.structs.replace(hello, pid=0, host="elsewhere")
        admission = f"{next(self.numbers):x}"
        worker = Worker(identity, hello, self.clock(), admission, self.router.sender)
        worker.joined = next(self._arrivals)
        self.by_identity[identity] = self.by_name[worker.name] = worker
        self.send(worker, Registered(self.config.heartbeat_s, worker.admission))
        if self._draining:
            self.send(worker, Drain())
        self.spawn(self._admit(worker))

    def _forbidden(self, hello: Register) -> str | None:
        """Why the sender's key may not register so, None if it may."""
        if (grant := self.router.grant(self.router.sender)) is None:
            return "its key was revoked: ask for a new invitation (coppice serve --invite)"
        if reason := bounds.misnamed(hello, grant):
            return reason
        if extra := [service for service in hello.services if not grant.allows(service)]:
            return f"its key may offer {', '.join(grant.services)}, and not {', '.join(extra)}"
        told = "a living worker of this name has another key: take another (coppice serve --name)"
        other = self.by_name.get(hello.worker)
        return told if other is not None and other.key != self.router.sender else None

    def refuse(self, identity: bytes, name: str, reason: str) -> None:
        """Send away a peer that may not do what it asks for."""
        self.counters["refused_peers"] += 1
        log.error("refused a peer that calls itself %r: %s", name[:100], reason)
        self.router.send([identity, *encode(Goodbye(f"refused: {reason}"))])

    async def _admit(self, worker: Worker) -> None:
        """Admit a worker once ``on_join`` has returned, in which an actor loads weights."""
        if self.on_join is not None:
            try:
                await self.on_join(worker)
            except Fault as fault:
                log.error("worker %s could not join: %s", worker.name, fault)
                self.remove(worker, f"could not join: {fault}")
                return
        if self.by_identity.get(worker.identity) is worker:
            worker.ready = True
            for service in worker.hello.services:
                self.pools[service].add(worker)
            self._joined.set()
            self._came(worker)

    def leave(self, worker: Worker, reason: str) -> None:
        """A worker has left or is given up."""
        if self.by_identity.get(worker.identity) is not worker:
            return  # gone already
        del self.by_identity[worker.identity], self.by_name[worker.name]
        worker.ready = False
        for service in worker.hello.services:
            self.pools[service].discard(worker)
        self._gone(worker, reason)
        if self.on_leave is not None:
            self.on_leave(worker, reason)

    async def _watch(self) -> None:
        """Give up every worker that has been silent for more than ``dead_after_s``. Time in which
        this process was held up counts little: it has not read the heartbeats of meanwhile."""
        while True:
            before = self.clock()
            await asyncio.sleep(self.config.heartbeat_s)
            now = self.clock()
            passed = min(now - before, 2 * self.config.heartbeat_s)
            if self.router.keys is not None:
                self.router.keys.reload()
            for worker in list(self.by_identity.values()):
                if self.router.grant(worker.key) is None:
                    self.remove(worker, "its key was revoked")
                    continue
                silent = 0.0 if worker.heard > before else worker.silent
                worker.silent = min(silent + passed, now - worker.heard)
                was_quiet = worker.quiet
                worker.quiet = worker.silent > QUIET_BEATS * self.config.heartbeat_s
                if worker.quiet and not was_quiet:
                    self._came(worker)  # calls that waited for it may take another worker now
                if worker.silent > self.config.dead_after_s:
                    self.counters["dead_workers"] += 1
                    self.leave(worker, f"silent for {now - worker.heard:.0f} s")

    def _broken(self) -> None:
        """A connection broke: give up its worker unless it is back soon."""
        if self._calling is None:
            self._calling = asyncio.get_running_loop().call_later(BACK_S, self._call_the_roll)

    def _call_the_roll(self) -> None:
        self._calling = None
        for worker in list(self.by_identity.values()):
            if not self.beat(worker):
                self.counters["dead_workers"] += 1
                self.leave(worker, "its connection broke")

    def spawn(self, work: Any) -> None:
        """Run a background task until ``close``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Future[None]) -> None:
        """A background task, or the receive loop, has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            log.error("a dispatcher task died", exc_info=error)
