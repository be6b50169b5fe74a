"""Every dispatched call reaches exactly one outcome."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice.scheduler.dispatch.calls import Place, Worker
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.service import Call, Service
from tests.services import Bench, EchoRequest, EchoResult, Prefer, bench

QUICK = DispatchConfig(heartbeat_s=0.05, dead_after_s=0.4)


def ask(value: float = 1.0) -> EchoRequest:
    return EchoRequest(np.array([value], np.float32))


async def echo(request: EchoRequest, call: Call) -> EchoResult:
    return EchoResult(request.tokens * 2, 0)


async def hang(request: Any, call: Call) -> Any:
    await asyncio.Event().wait()


async def test_a_call_nobody_can_serve_ends_at_its_deadline_and_says_so(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        with pytest.raises(InfrastructureFault, match="no free worker"):
            await b.dispatcher.call("echo", ask(), deadline=0.2)


@pytest.mark.second
async def test_a_deadline_names_workers_that_are_full_that_rest_or_hang(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("hanger", {"echo": hang}, capacity=1)
        for state in ["hanger"] * 5 + ["hanger rests after 5 failed calls"]:
            with pytest.raises(InfrastructureFault, match=f"echo took over 0.1 s .*{state}"):
                await b.dispatcher.call("echo", ask(), deadline=0.1)


async def test_a_call_runs_where_its_place_says_which_sees_each_attempt(tmp_path: Path) -> None:
    async def broken(request: EchoRequest, call: Call) -> EchoResult:
        raise InfrastructureFault("no luck")

    async with bench(tmp_path) as b:
        await b.work("a", {"echo": echo})
        await b.work("b", {"echo": echo})
        await b.work("broken", {"echo": broken})
        for wanted, log in (("b", [("b", True)]), ("a", [("a", True)])):
            place = Prefer(wanted)
            await b.dispatcher.call("echo", ask(), deadline=10, place=place)
            assert (place.log, place.open) == (log, [])
        place = Prefer("broken")
        await b.dispatcher.call("echo", ask(), deadline=10, place=place)
        assert place.log[0] == ("broken", False)
        assert [served for _, served in place.log] == [False, True]


def call(b: Bench, place: Place) -> asyncio.Task[EchoResult]:
    return asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=30, place=place))


class Ranked(Place):
    """Held back until ``free`` is set; noted when it starts."""

    def __init__(self, rank: int, started: list[int], free: asyncio.Event):
        self.number, self.order, self.free = rank, started, free

    def rank(self) -> tuple[int, ...]:
        return (self.number,)

    def choose(self, workers: Sequence[Worker], avoid: frozenset[str]) -> Worker | None:
        return super().choose(workers, avoid) if self.free.is_set() else None

    def started(self, worker: str) -> None:
        self.order.append(self.number)


async def test_a_held_back_call_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    started: list[int] = []
    held, free = asyncio.Event(), asyncio.Event()
    free.set()
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo})
        waits = call(b, Ranked(0, started, held))
        await asyncio.sleep(0)
        await call(b, Ranked(1, started, free))
        await b.dispatcher.call("echo", ask(), deadline=10)
        assert started == [1]
        held.set()  # nobody tells the dispatcher
        await waits
    assert started == [1, 0]


class Kin(Ranked):
    """One of many calls that wait together. asked: how often any of them was asked; begun: the
    families of which one has started."""

    def __init__(self, number: int, family: int, asked: list[int], begun: set[int], *ranked: Any):
        super().__init__(number, *ranked)
        self.family, self.asked, self.begun = family, asked, begun

    def rank(self) -> tuple[int, ...]:
        return self.family not in self.begun, self.family

    def waits_with(self) -> str:
        return "kin"

    def choose(self, workers: Sequence[Worker], avoid: frozenset[str]) -> Worker | None:
        self.asked.append(self.number)
        return super().choose(workers, avoid)

    def started(self, worker: str) -> None:
        super().started(worker)
        self.begun.add(self.family)


async def test_of_calls_that_wait_together_only_one_is_asked(tmp_path: Path) -> None:
    asked, begun, started, free = list[int](), set[int](), list[int](), asyncio.Event()
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo}, capacity=1)
        places = [Kin(number, number % 20, asked, begun, started, free) for number in range(60)]
        calls = [call(b, place) for place in places]
        await asyncio.sleep(0)
        assert set(asked) == {0} and len(asked) <= 60
        free.set()
        b.dispatcher.look_again("echo")
        await asyncio.gather(*calls)
        # each call is asked once when it starts, and the timer may ask the first again
        assert len(asked) <= 60 + 60 + 5
    assert started == [number + 20 * sibling for number in range(20) for sibling in range(3)]


async def test_a_worker_that_joins_a_run_at_its_end_is_asked_to_leave(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.dispatcher.roster.drain()
        service = Service("late", {"echo": echo}, 1)
        await asyncio.wait_for(service.run(b.dispatcher.endpoint, b.keys, signals=False), 30)


async def test_a_joining_worker_gets_no_work_before_its_hook_returns(tmp_path: Path) -> None:
    order: list[str] = []

    async def note(request: EchoRequest, call: Call) -> EchoResult:
        order.append("work")
        return EchoResult(request.tokens, 0)

    async def load(request: Any, call: Call) -> Any:
        raise DataFault("never mind")

    async with bench(tmp_path) as b:

        async def joined(worker: Any) -> None:
            with pytest.raises(Fault):
                await b.dispatcher.call("load", ask(), deadline=5, worker=worker.name)
            order.append("prepared")

        b.dispatcher.roster.on_join = joined
        caller = asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=10))
        await b.work("w", {"echo": note, "load": load})
        await caller
    assert order == ["prepared", "work"]
