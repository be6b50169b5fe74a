"""A worker process: registers its services, answers requests, beats, drains.

States: connecting -> registered -> (lost -> connecting)* -> draining -> gone. Every request that was accepted gets exactly one
Result or Error, unless it was cancelled or the connection was lost (then the scheduler gives it to another worker).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket as host_socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from wire.arrays import Limits, decode_body, decode_header, encode
from wire.faults import Fault, WireError
from wire.messages import (
    SERVICES,
    Cancel,
    Drain,
    Error,
    Goodbye,
    Heartbeat,
    Message,
    Partial,
    Register,
    Registered,
    Request,
    Result,
)
from wire.sockets import Dealer, RunKeys

log = logging.getLogger("wire.service")

SCHEDULER_SILENCE_S = 15.0
"""Heartbeats are echoed every two seconds; after this silence the worker registers anew."""


class Rejected(ConnectionError):
    """The scheduler refused this worker, or was gone for longer than the worker waits."""


def service_types(service: str) -> tuple[type, type]:
    """Request and result struct of a service; ``judge.<name>`` shares the row ``judge``."""
    row = SERVICES.get(service.split(".", 1)[0])
    if row is None:
        raise WireError(f"unknown service {service!r}: expected one of {sorted(SERVICES)}")
    return row


class Call:
    """What a handler may do besides returning: send partial results, see how long it has left."""

    def __init__(self, service: "Service", header: Request):
        self._service = service
        self.id = header.id
        self.name = header.service
        self.deadline = time.monotonic() + header.deadline_s
        self.cancelled = asyncio.Event()

    def partial(self, body: msgspec.Struct) -> None:
        """Send one piece of the answer now."""
        self._service.send(Partial(self.id), body)


Handler = Callable[[Any, Call], Awaitable[msgspec.Struct]]


class Service:
    """Offers ``handlers`` (service name -> coroutine of request struct and Call) with at most ``capacity`` in flight.

    ``stats`` is read at every heartbeat: counters and gauges by name. Handlers raise DataFault, PolicyFault or
    InfrastructureFault; anything else is logged with its traceback and reported as infrastructure.
    """

    def __init__(
        self,
        name: str,
        handlers: dict[str, Handler],
        capacity: int,
        stats: Callable[[], dict[str, float]] = dict,
        give_up_s: float = 60.0,
        limits: Limits = Limits(),
    ):
        for service in handlers:
            service_types(service)
        self.name, self.handlers, self.capacity, self.stats = name, handlers, capacity, stats
        self.give_up_s, self.limits = give_up_s, limits
        self.tasks: dict[int, tuple[asyncio.Task[None], Call]] = {}
        self.draining = asyncio.Event()
        self.registered = asyncio.Event()
        self._dealer: Dealer | None = None
        self._heard = time.monotonic()
        self._beat_s = 2.0

    def send(self, header: Message, body: msgspec.Struct | None = None) -> None:
        """Queue a message; arrays are not copied, so the body must not be changed afterwards."""
        assert self._dealer is not None, "send before run"
        self._dealer.socket.send_multipart(encode(header, body), copy=False)

    def drain(self) -> None:
        """Take no more work, finish what is in flight, then leave. Safe to call from a signal handler."""
        self.draining.set()

    async def run(self, endpoint: str, keys: RunKeys | None, signals: bool = True) -> None:
        """Serve until drained. Raises Rejected when the scheduler refuses or stays away for ``give_up_s`` seconds."""
        identity = f"{self.name}/{os.getpid()}/{os.urandom(3).hex()}".encode()
        self._dealer = Dealer(endpoint, keys, identity, self.limits)
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.drain)
        work = [asyncio.create_task(step()) for step in (self._receive, self._beat, self._leave_when_drained)]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*work, *(task for task, _ in self.tasks.values())):
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._dealer.close()

    def _register(self) -> None:
        self.send(Register(self.name, list(self.handlers), self.capacity, os.getpid(), host_socket.gethostname()))

    async def _beat(self) -> None:
        lost_since = time.monotonic()
        while True:
            if not self.registered.is_set():
                if time.monotonic() - lost_since > self.give_up_s:
                    raise Rejected(f"{self.name}: no scheduler answered for {self.give_up_s:.0f} s; giving up")
                self._register()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.registered.wait(), 1.0)
                continue
            self.send(Heartbeat(len(self.tasks), self.stats()))
            await asyncio.sleep(self._beat_s)
            if time.monotonic() - self._heard > SCHEDULER_SILENCE_S:
                log.warning("%s: the scheduler is silent, registering anew", self.name)
                lost_since = time.monotonic()
                self.registered.clear()

    async def _receive(self) -> None:
        assert self._dealer is not None
        while True:
            frames = [frame.buffer for frame in await self._dealer.socket.recv_multipart(copy=False)]
            try:
                header = decode_header(frames, self.limits)
            except WireError as error:
                log.error("%s: dropped a malformed message: %s", self.name, error)
                continue
            self._heard = time.monotonic()
            self._handle(header, frames)

    def _handle(self, header: Message, frames: list[memoryview]) -> None:
        match header:
            case Registered(heartbeat_s=seconds):
                self._beat_s = seconds
                self.registered.set()
            case Request():
                call = Call(self, header)
                self.tasks[header.id] = (asyncio.create_task(self._serve(header, frames, call)), call)
            case Cancel(id=number) if number in self.tasks:
                task, call = self.tasks[number]
                call.cancelled.set()
                task.cancel()
            case Drain():
                self.drain()
            case Goodbye(reason=reason) if reason == "register":
                self.registered.clear()  # a scheduler that was restarted, or that had given us up, asks for a new start
            case Goodbye(reason=reason):
                raise Rejected(f"{self.name}: the scheduler refused this worker: {reason}")
            case _:
                pass

    async def _serve(self, header: Request, frames: list[memoryview], call: Call) -> None:
        try:
            handler = self.handlers.get(header.service)
            if handler is None:
                raise WireError(f"{self.name} does not offer {header.service!r}, only {sorted(self.handlers)}")
            request = decode_body(frames, service_types(header.service)[0])
            async with asyncio.timeout(header.deadline_s):
                answer = await handler(request, call)
            self.send(Result(header.id), answer)
        except Fault as fault:
            self.send(Error(header.id, fault.kind, str(fault)))
        except TimeoutError:
            message = f"{header.service} on {self.name} passed its deadline of {header.deadline_s:.1f} s"
            self.send(Error(header.id, "infrastructure", message))
        except Exception as error:  # the one boundary where a handler's failure becomes a message
            log.exception("%s: %s failed", self.name, header.service)
            self.send(Error(header.id, "infrastructure", f"{type(error).__name__}: {error}"))
        finally:
            self.tasks.pop(header.id, None)

    async def _leave_when_drained(self) -> None:
        await self.draining.wait()
        if self.registered.is_set():
            self.send(Drain())
        while self.tasks:
            await asyncio.wait([task for task, _ in self.tasks.values()])
        self.send(Goodbye("drained"))
