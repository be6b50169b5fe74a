"""The service of a worker process: it registers, sends heartbeats, answers requests and drains.

States: connecting -> registered -> (lost -> connecting)* -> draining -> gone. Every accepted
request gets exactly one Result or Error, unless the request was cancelled or the scheduler has
moved it to another worker.
"""

import asyncio
import functools
import logging
import os
import signal
import socket as host_socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from coppice.wire import messages as wire
from coppice.wire.arrays import Frame, Limits, check, decode_body, decode_header, encode
from coppice.wire.faults import Fault, InfrastructureFault, WireError
from coppice.wire.keys import PeerKeys
from coppice.wire.sockets import Dealer

log = logging.getLogger("wire.service")

REGISTER_AGAIN = "register"
"""A scheduler's Goodbye with this reason tells a peer that it does not know (any more) to register
again. Any other reason is final."""
PINNED_ROOM = 8
"""Requests for one certain worker (new weights) do not wait until it is free, so a worker accepts
this many above its capacity."""
UNBOUNDED = 2**20
"""The learner's capacity. The scheduler's admission bounds the groups in flight; a capacity could
be filled by trees that still grow, and what would close those trees would wait for ever."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.2, 5.0


class Rejected(ConnectionError):
    """The scheduler refused this worker, or was silent for longer than the worker waits."""


@functools.cache
def service_types(service: str) -> tuple[type, type]:
    """Return the request and result struct of a service. Every ``judge.<name>`` uses the row
    ``judge``, and so on."""
    if (row := wire.SERVICES.get(service.split(".", 1)[0])) is None:
        raise WireError(f"unknown service {service!r}: expected one of {sorted(wire.SERVICES)}")
    return row


class Call:
    """An open request, as its handler sees it, until its Result or Error is queued. deadline: on
    the clock of ``time.monotonic``. cancelled: set when nobody wants the answer any more; the
    handler's task is cancelled at the same moment."""

    def __init__(self, header: wire.Request):
        self.late, self.deadline = False, time.monotonic() + header.deadline_s
        self.cancelled = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def cancel(self, late: bool = False) -> None:
        """Stop the work and send no answer, or an Error if it is ``late`` for its deadline."""
        if late:
            self.late = True
        else:
            self.cancelled.set()
        if self.task is not None:
            self.task.cancel()


Handler = Callable[[Any, Call], Awaitable[msgspec.Struct]]


class Service:
    """Offers ``handlers`` and answers at most ``capacity`` requests at once; see the module for its
    states.

    ``stats`` is called at every heartbeat and returns counters and gauges by name. A handler may
    raise DataFault or InfrastructureFault; any other exception is logged and reported as
    infrastructure. After ``silence_s`` seconds without an echo of its heartbeats the worker
    registers again, and after ``give_up_s`` more seconds without an answer it gives up.
    """

    def __init__(
        self, name: str, handlers: dict[str, Handler], capacity: int,
        stats: Callable[[], dict[str, float]] = dict, give_up_s: float = 60.0,
        silence_s: float = 15.0,
    ):  # fmt: skip
        for service in handlers:
            service_types(service)
        self.name, self.handlers, self.capacity, self.stats = name, handlers, capacity, stats
        self.give_up_s, self.silence_s = give_up_s, silence_s
        self.calls: dict[int, Call] = {}
        self.draining = asyncio.Event()
        self.registered = asyncio.Event()
        self._dealer: Dealer | None = None
        self._heard = time.monotonic()
        self._beat_s = 2.0
        self._admission: str | None = None
        self._echo = 0

    def send(self, header: wire.Message, body: msgspec.Struct | None = None) -> None:
        """Queue a message. The body must not be changed afterwards, because large arrays are not
        copied. Raises WireError if it exceeds the limits."""
        assert self._dealer is not None, "send before run"
        check(frames := encode(header, body), Limits())
        self._dealer.send(frames)

    def drain(self) -> None:
        """Take no new requests, finish the open ones, then leave. May be called from a signal
        handler."""
        self.draining.set()

    async def run(self, endpoint: str, keys: PeerKeys | None, signals: bool = True) -> None:
        """Serve until drained. Raises Rejected when the scheduler refuses this worker or does not
        answer for ``give_up_s`` seconds."""
        # Nobody can guess the identity, so nobody can take over the connection.
        identity = f"{self.name}/{os.getpid()}/{os.urandom(8).hex()}".encode()
        self._dealer = Dealer(endpoint, keys, identity)
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.drain)
        received = self._dealer.listen(self._receive)
        work = [asyncio.create_task(step()) for step in (self._beat, self._leave_when_drained)]
        try:
            done, _ = await asyncio.wait([received, *work], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._dealer.stop()  # requests that arrive from here on go to other workers
            open_tasks = [call.task for call in self.calls.values() if call.task is not None]
            for call in self.calls.values():
                call.cancelled.set()
            for task in (*work, *open_tasks):
                task.cancel()
            try:
                received.cancel()
                await asyncio.gather(received, *work, *open_tasks, return_exceptions=True)
            finally:
                # even when cancelled here, because garbage collection of an open context would hang
                self._dealer.close()

    async def _beat(self) -> None:
        while True:
            if not self.registered.is_set():
                await self._register()
            self.send(wire.Heartbeat(len(self.calls), self.stats(), list(self.calls), self._echo))
            await asyncio.sleep(self._beat_s)
            if self.registered.is_set() and time.monotonic() - self._heard > self.silence_s:
                log.warning("%s: the scheduler is silent, registering anew", self.name)
                self.registered.clear()

    async def _register(self) -> None:
        """Send the registration at growing intervals until the scheduler accepts it."""
        hello = wire.Register(
            self.name, list(self.handlers), self.capacity, os.getpid(), host_socket.gethostname()
        )
        end, pause = time.monotonic() + self.give_up_s, _FIRST_RETRY_S
        while not self.registered.is_set():
            if (left := end - time.monotonic()) <= 0:
                raise Rejected(
                    f"{self.name}: no scheduler answered for {self.give_up_s:.0f} s. Is the run"
                    " still alive, and does this worker have its endpoint and a key that was not"
                    " revoked?"
                )
            self.send(hello)
            try:
                async with asyncio.timeout(min(pause, left)):
                    await self.registered.wait()
            except TimeoutError:
                pause = min(2 * pause, _LAST_RETRY_S)

    async def _leave_when_drained(self) -> None:
        await self.draining.wait()
        if self.registered.is_set():
            self.send(wire.Drain())
        while self.calls:
            await asyncio.wait([call.task for call in self.calls.values() if call.task is not None])
        self.send(wire.Goodbye("drained"))

    def _admitted(self, header: wire.Registered) -> None:
        if self._admission not in (None, header.admission):
            for call in self.calls.values():
                call.cancel()
            self._echo = 0
        self._admission, self._beat_s = header.admission, header.heartbeat_s
        self.registered.set()
        if self.draining.is_set():
            self.send(wire.Drain())

    def _receive(self, frames: list[Frame]) -> None:
        try:
            header = decode_header(frames)
        except WireError as error:
            log.error("%s: dropped a malformed message: %s", self.name, error)
            return
        self._heard = time.monotonic()
        match header:
            case wire.Request():
                self._accept(header, frames)
            case wire.Cancel(id=number):
                if number in self.calls:
                    self.calls[number].cancel()
            case wire.Registered():
                self._admitted(header)
            case wire.Drain():
                self.drain()
            case wire.Goodbye(reason=reason):
                if reason != REGISTER_AGAIN:
                    raise Rejected(f"{self.name}: the scheduler sent this worker away: {reason}")
                self.registered.clear()
            case wire.Heartbeat(echo=echo):
                self._echo = echo
            case _:  # what only a worker sends
                pass

    def _accept(self, header: wire.Request, frames: list[Frame]) -> None:
        if len(self.calls) >= self.capacity + PINNED_ROOM:
            over = f"is over its capacity of {self.capacity}: {len(self.calls)} are open"
            self.send(wire.Error(header.id, "infrastructure", f"{self.name} {over}"))
            return
        call = Call(header)
        self.calls[header.id] = call
        call.task = asyncio.create_task(self._serve(header, frames, call))
        # A task that is cancelled before its first step never reaches its own ``finally``.
        call.task.add_done_callback(lambda _: self.calls.pop(header.id, None))

    async def _serve(self, header: wire.Request, frames: list[Frame], call: Call) -> None:
        timer = asyncio.get_running_loop().call_later(header.deadline_s, call.cancel, True)
        try:
            if (handler := self.handlers.get(header.service)) is None:
                raise InfrastructureFault(
                    f"{self.name} does not offer {header.service!r}, only {sorted(self.handlers)}"
                )
            answer = await handler(decode_body(frames, service_types(header.service)[0]), call)
            if not call.cancelled.is_set():
                self.send(wire.Result(header.id), answer)
        except asyncio.CancelledError:
            if call.cancelled.is_set():
                raise
            late = f"passed its deadline of {header.deadline_s:.1f} s"
            reason = late if call.late else "was cancelled by its handler"
            message = f"{header.service} on {self.name} {reason}"
            self.send(wire.Error(header.id, "infrastructure", message))
        except Fault as fault:
            self.send(wire.Error(header.id, fault.kind, str(fault)))
        except Exception as error:  # the one boundary where a handler's failure becomes a message
            log.exception("%s: %s failed", self.name, header.service)
            self.send(wire.Error(header.id, "infrastructure", f"{type(error).__name__}: {error}"))
        finally:
            # The place is free as soon as the answer is queued, because the scheduler may use it
            # before this task's callbacks run.
            self.calls.pop(header.id, None)
            timer.cancel()
