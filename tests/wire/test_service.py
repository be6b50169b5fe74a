"""Every request that a worker accepted gets exactly one Result or Error, unless it was cancelled or
moved elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from coppice.wire import messages as wire
from coppice.wire import service
from coppice.wire.arrays import Frame, Limits, decode_header, encode
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.service import PINNED_ROOM, REGISTER_AGAIN, Call, Service
from coppice.wire.sockets import Dealer, Router
from tests.services import EchoRequest, EchoResult, ask, echo, forever

Kind = TypeVar("Kind", bound=msgspec.Struct)


class Scheduler:
    """A scheduler of a few lines, so that a test says exactly what crosses the wire."""

    def __init__(self, bind: str = "tcp://127.0.0.1:0"):
        self.router = Router(bind, None)
        self.peer = b""
        self.inbox: asyncio.Queue[tuple[wire.Message, list[Frame]]] = asyncio.Queue()
        self.router.listen(self._take)

    def _take(self, parts: list[Frame]) -> None:
        self.peer = bytes(parts[0])
        self.inbox.put_nowait((decode_header(parts[1:]), parts[1:]))

    def send(self, header: wire.Message, body: msgspec.Struct | None = None) -> None:
        self.router.send([self.peer, *encode(header, body)])

    async def next(self, kind: type[Kind]) -> Kind:
        """The next message of ``kind``, after beats and registrations."""
        async with asyncio.timeout(10):
            while True:
                header, self.frames = await self.inbox.get()
                if isinstance(header, kind):
                    return header
                assert isinstance(header, wire.Heartbeat | wire.Register), header

    async def admit(self, admission: str = "first", heartbeat_s: float = 0.02) -> None:
        await self.next(wire.Register)
        self.send(wire.Registered(heartbeat_s, admission))

    def ask(self, number: int, value: float = 0.0, deadline_s: float = 60.0) -> None:
        self.send(wire.Request(number, "echo", deadline_s), ask(value))


@asynccontextmanager
async def serving(service: Service, endpoint: str) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(service.run(endpoint, None, signals=False))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def pair(
    handler: Any, capacity: int = 4, **options: Any
) -> AsyncIterator[tuple[Scheduler, Service]]:
    scheduler, service = Scheduler(), Service("w", {"echo": handler}, capacity, **options)
    async with serving(service, scheduler.router.endpoint):
        await scheduler.admit()
        yield scheduler, service
    scheduler.router.close()


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (DataFault("no gold"), "data", "no gold"),
        (InfrastructureFault("disk"), "infrastructure", "disk"),
        (KeyError("k"), "infrastructure", "KeyError"),
        (TimeoutError("a socket of its own"), "infrastructure", "a socket of its own"),
        (asyncio.CancelledError(), "infrastructure", "cancelled by its handler"),
    ],
)
async def test_what_a_handler_raises_arrives_as_a_fault_of_its_kind(
    raised: BaseException, kind: str, message: str
) -> None:
    async def fail(request: Any, call: Call) -> Any:
        raise raised

    async with pair(fail) as (scheduler, _):
        scheduler.ask(1)
        error = await scheduler.next(wire.Error)
        assert (error.id, error.kind) == (1, kind)
        assert message in error.message


async def test_an_answer_above_the_limits_is_a_fault_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "Limits", lambda: Limits(max_frames=2))
    async with pair(echo) as (scheduler, _):
        scheduler.ask(1, 1.0)  # whose answer has an array, which is a third frame
        error = await scheduler.next(wire.Error)
        assert error.id == 1 and "WireError: a message of 3 frames" in error.message


async def test_a_deadline_ends_the_work_on_the_worker_too() -> None:
    async with pair(forever) as (scheduler, service):
        scheduler.ask(1, deadline_s=0.05)
        assert "passed its deadline" in (await scheduler.next(wire.Error)).message
        assert not service.calls


class Hanging:
    """A handler that answers any number but 0, for which it hangs. cleared: it was cancelled, and
    answers nevertheless."""

    def __init__(self) -> None:
        self.entered, self.cleared = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: EchoRequest, call: Call) -> EchoResult:
        if not request.tokens[0]:
            self.call = call
            self.entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cleared.set()
        return EchoResult(request.tokens, 0)


async def test_a_cancelled_request_is_stopped_told_so_and_never_answered() -> None:
    stubborn = Hanging()
    async with pair(stubborn) as (scheduler, _):
        scheduler.ask(1)
        await asyncio.wait_for(stubborn.entered.wait(), 5)
        scheduler.send(wire.Cancel(1))
        await asyncio.wait_for(stubborn.cleared.wait(), 5)
        assert stubborn.call.cancelled.is_set()
        scheduler.ask(2, value=1.0)
        assert (await scheduler.next(wire.Result)).id == 2


async def test_a_request_cancelled_before_its_first_step_leaves_nothing_behind() -> None:
    async with pair(forever) as (scheduler, service):
        scheduler.ask(1)
        scheduler.send(wire.Cancel(1))
        scheduler.send(wire.Drain())
        await scheduler.next(wire.Drain)
        await scheduler.next(wire.Goodbye)
        assert not service.calls


async def test_a_worker_refuses_what_is_over_its_capacity_and_pinned_room() -> None:
    async with pair(forever, capacity=2) as (scheduler, service):
        for number in range(2 + PINNED_ROOM + 1):
            scheduler.ask(number)
        error = await scheduler.next(wire.Error)
        assert error.id == 2 + PINNED_ROOM
        assert "over its capacity of 2" in error.message
        assert len(service.calls) == 2 + PINNED_ROOM


async def test_a_silent_scheduler_is_asked_again_and_the_open_work_goes_on() -> None:
    opened = asyncio.Event()

    async def wait(request: EchoRequest, call: Call) -> EchoResult:
        await opened.wait()
        return EchoResult(request.tokens, 0)

    async with pair(wait, silence_s=0.05) as (scheduler, _):
        scheduler.ask(1)
        await scheduler.admit("first")
        opened.set()
        assert (await scheduler.next(wire.Result)).id == 1


async def test_a_worker_is_heard_on_a_new_connection_while_the_old_one_stands() -> None:
    scheduler, heard = Scheduler(), asyncio.Queue[list[Frame]]()
    dealers = list[Dealer]()
    try:
        for number in range(2):  # the first connection stands
            dealers.append(Dealer(scheduler.router.endpoint, None, b"w/1/a"))
            dealers[-1].send(encode(wire.Heartbeat(number, {}, [], 0)))
            assert (await scheduler.next(wire.Heartbeat)).in_flight == number
        dealers[-1].listen(heard.put_nowait)
        scheduler.send(wire.Goodbye("for the new connection"))
        async with asyncio.timeout(10):
            assert decode_header(await heard.get()) == wire.Goodbye("for the new connection")
    finally:
        for socket in (*dealers, scheduler.router):
            socket.close()


async def test_an_old_worker_that_is_asked_to_register_again_has_the_whole_time_to_do_so() -> None:
    async with pair(echo, give_up_s=0.2) as (scheduler, _):
        for _ in range(12):  # longer than give_up_s since the start
            await scheduler.next(wire.Heartbeat)
        scheduler.send(wire.Goodbye(REGISTER_AGAIN))
        await scheduler.admit("second")
        scheduler.ask(1)
        assert (await scheduler.next(wire.Result)).id == 1


async def test_a_new_scheduler_finds_the_worker_and_old_work_is_abandoned(tmp_path: Path) -> None:
    hangs, old = Hanging(), Scheduler(f"ipc://{tmp_path}/scheduler")
    async with serving(Service("w", {"echo": hangs}, 1, silence_s=0.1), old.router.endpoint):
        await old.admit("old")
        old.ask(1)
        await asyncio.wait_for(hangs.entered.wait(), 5)
        old.router.close()
        new = Scheduler(f"ipc://{tmp_path}/scheduler")
        await new.admit("new")
        await asyncio.wait_for(hangs.cleared.wait(), 5)
        new.ask(1, value=1.0)
        assert (await new.next(wire.Result)).id == 1
        new.router.close()
