"""How calls over real sockets end, and what is told of it. That each reaches exactly one outcome is
proven in virtual time: tests/simulation and test_hedging.py."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from coppice.scheduler.dispatch.calls import Place, Worker
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.wire.faults import DataFault, Fault, InfrastructureFault, WireError
from coppice.wire.service import Call, Service
from tests.services import Bench, EchoRequest, EchoResult, ask, bench, echo, forever


@pytest_asyncio.fixture
async def b(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench(tmp_path) as made:
        yield made


async def test_closing_ends_calls_that_run_that_wait_and_that_back_off(b: Bench) -> None:
    entered, failed = asyncio.Event(), asyncio.Event()

    async def first_fails(request: EchoRequest, call: Call) -> EchoResult:
        if request.tokens[0] == 0:
            raise InfrastructureFault("back off")
        entered.set()
        return await forever(request, call)

    b.dispatcher.on_event = lambda event: failed.set()
    await b.work("w", {"echo": first_fails}, capacity=1)
    started = (b.dispatcher.call("echo", ask(value), deadline=60) for value in (0, 1, 2))
    calls = [asyncio.create_task(call) for call in started]
    async with asyncio.timeout(5):
        await failed.wait()
        await entered.wait()
    await b.dispatcher.close()
    for call in (*calls, b.dispatcher.call("echo", ask(), deadline=1)):
        with pytest.raises(InfrastructureFault, match="closed"):
            await call


async def test_a_call_pinned_to_an_absent_worker_fails_at_once(b: Bench) -> None:
    await b.work("here", {"echo": echo})
    with pytest.raises(InfrastructureFault, match=r"no worker 'gone' is here, only \['here'\]"):
        await b.dispatcher.call("echo", ask(), deadline=60, worker="gone")


async def test_a_request_that_cannot_be_sent_is_its_callers_error(b: Bench) -> None:
    await b.work("w", {"echo": echo})
    with pytest.raises(WireError, match="dtype"):
        await b.dispatcher.call("echo", EchoRequest(np.array(["text"])), deadline=5)
    with pytest.raises(WireError, match="unknown service 'sing'"):
        await b.dispatcher.call("sing", ask(), deadline=5)
    await b.dispatcher.call("echo", ask(), deadline=5)
    assert b.dispatcher.open_calls() == []


LATE = [
    (DataFault("no such page"), "^w: no such page$"),
    (InfrastructureFault("no luck"), "^echo took over 60.0 s on w, which answered: no luck$"),
]


@pytest.mark.parametrize(("fault", "told"), LATE)
async def test_an_error_that_comes_after_the_deadline_still_tells_its_reason(
    fault: Fault, told: str, tmp_path: Path
) -> None:
    async with bench(tmp_path, DispatchConfig(dead_after_s=1e6)) as b:

        async def late(request: EchoRequest, call: Call) -> EchoResult:
            b.dispatcher.clock = lambda: time.monotonic() + 60.0
            raise fault

        await b.work("w", {"echo": late})
        with pytest.raises(type(fault), match=told):
            await b.dispatcher.call("echo", ask(), deadline=60)
        assert b.dispatcher.counters["timeouts"] == isinstance(fault, InfrastructureFault)


async def test_a_second_process_of_a_name_replaces_the_first(b: Bench) -> None:
    left: list[str] = []
    b.dispatcher.roster.on_leave = lambda worker, reason: left.append(reason)
    await b.work("w", {"echo": echo})
    first = b.tasks.pop("w")
    again = Service("w", {"echo": echo}, 4)
    b.tasks["w"] = asyncio.create_task(again.run(b.dispatcher.endpoint, b.keys, signals=False))
    with pytest.raises(ConnectionError, match="replaced by a new process"):
        await asyncio.wait_for(first, 5)
    await b.dispatcher.wait_for("echo", 1, 5)
    await b.dispatcher.call("echo", ask(), deadline=5)
    assert left == ["replaced by a new process of the same name w"]


async def test_a_wait_for_workers_says_how_many_are_missing(b: Bench) -> None:
    await b.work("w", {"echo": echo})
    with pytest.raises(InfrastructureFault, match="1 of 2 workers for service 'echo'"):
        await b.dispatcher.wait_for("echo", 2, 0.05)


async def test_a_pinned_call_goes_through_to_a_full_worker(b: Bench) -> None:
    entered = asyncio.Event()

    async def first_hangs(request: EchoRequest, call: Call) -> EchoResult:
        if request.tokens[0]:
            return EchoResult(request.tokens, 0)
        entered.set()
        return await forever(request, call)

    await b.work("w", {"echo": first_hangs}, capacity=1)
    held = asyncio.create_task(b.dispatcher.call("echo", ask(0), deadline=60))
    await asyncio.wait_for(entered.wait(), 5)
    await b.dispatcher.call("echo", ask(1), deadline=5, worker="w")
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)


@pytest.mark.second
async def test_a_deadline_names_workers_that_are_full_that_rest_or_hang(b: Bench) -> None:
    await b.work("hanger", {"echo": forever}, capacity=1)
    for state in ["hanger"] * 5 + ["hanger rests after 5 failed calls"]:
        with pytest.raises(InfrastructureFault, match=f"echo took over 0.1 s .*{state}"):
            await b.dispatcher.call("echo", ask(), deadline=0.1)


class Kin(Place):
    """One of many calls that wait together, held back until ``free`` is set."""

    def __init__(self, number: int, asked: list[int], order: list[int], free: asyncio.Event):
        self.number, self.asked, self.order, self.free = number, asked, order, free

    def rank(self) -> tuple[int, ...]:
        family = self.number % 20
        return family not in {number % 20 for number in self.order}, family

    def waits_with(self) -> str:
        return "kin"

    def choose(self, workers: Sequence[Worker], avoid: frozenset[str]) -> Worker | None:
        self.asked.append(self.number)
        return super().choose(workers, avoid) if self.free.is_set() else None

    def started(self, worker: str) -> None:
        self.order.append(self.number)


async def test_of_held_back_calls_that_wait_together_one_is_asked_and_asked_again(b: Bench) -> None:
    asked, started, free = list[int](), list[int](), asyncio.Event()
    await b.work("w", {"echo": echo}, capacity=1)
    places = [Kin(number, asked, started, free) for number in range(60)]
    work = (b.dispatcher.call("echo", ask(), deadline=30, place=place) for place in places)
    calls = [asyncio.create_task(call) for call in work]
    await asyncio.sleep(0)
    await b.dispatcher.call("echo", ask(), deadline=10)  # it is not held up
    assert set(asked) == {0} and len(asked) <= 65
    free.set()  # nobody tells the dispatcher
    await asyncio.gather(*calls)
    # each call is asked once when it starts, and the timer may ask the first again
    assert len(asked) <= 60 + 60 + 10
    assert started == [number + 20 * sibling for number in range(20) for sibling in range(3)]


async def test_a_worker_that_joins_a_run_at_its_end_is_asked_to_leave(b: Bench) -> None:
    await b.dispatcher.roster.drain()
    service = Service("late", {"echo": echo}, 1)
    await asyncio.wait_for(service.run(b.dispatcher.endpoint, b.keys, signals=False), 30)
