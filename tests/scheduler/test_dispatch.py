"""Every dispatched call reaches exactly one outcome."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.scheduler.dispatch.placement import Load, Place
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import Closed, Trained, TrainGroup, TreeClosed
from coppice.wire.service import UNBOUNDED, Call, Service
from tests.services import EchoRequest, EchoResult, Prefer, bench

QUICK = DispatchConfig(heartbeat_s=0.05, dead_after_s=0.4)


def ask(value: float = 1.0) -> EchoRequest:
    return EchoRequest(np.array([value], np.float32))


async def echo(request: EchoRequest, call: Call) -> EchoResult:
    return EchoResult(request.tokens * 2, 0)


async def hang(request: Any, call: Call) -> Any:
    await asyncio.Event().wait()


async def test_a_call_returns_the_workers_result(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo})
        result: EchoResult = await b.dispatcher.call("echo", ask(3), deadline=5)
        assert result.tokens.tolist() == [6]


async def test_in_flight_never_exceeds_the_declared_capacity(tmp_path: Path) -> None:
    running, most = 0, 0

    async def count(request: EchoRequest, call: Call) -> EchoResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return EchoResult(request.tokens, 0)

    async with bench(tmp_path) as b:
        await b.work("w", {"echo": count}, capacity=3)
        await asyncio.gather(*(b.dispatcher.call("echo", ask(), deadline=10) for _ in range(40)))
    assert most == 3


async def test_an_infrastructure_fault_is_retried_on_another_worker(tmp_path: Path) -> None:
    async def broken(request: EchoRequest, call: Call) -> EchoResult:
        raise InfrastructureFault("no luck")

    async with bench(tmp_path) as b:
        await b.work("broken", {"echo": broken})
        await b.work("sound", {"echo": echo})
        for _ in range(6):
            assert (await b.dispatcher.call("echo", ask(), deadline=5)).tokens.tolist() == [2]
        assert b.dispatcher.counters["retries"] >= 1


async def test_a_data_fault_is_not_retried(tmp_path: Path) -> None:
    calls = 0

    async def refuse(request: EchoRequest, call: Call) -> EchoResult:
        nonlocal calls
        calls += 1
        raise DataFault("cannot work anywhere")

    async with bench(tmp_path) as b:
        await b.work("w", {"echo": refuse})
        with pytest.raises(DataFault, match="w: cannot work anywhere"):
            await b.dispatcher.call("echo", ask(), deadline=5)
    assert calls == 1


async def test_a_deadline_names_the_worker_that_hangs_and_cancels_it(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    async def watch(request: Any, call: Call) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with bench(tmp_path) as b:
        await b.work("slow", {"echo": watch})
        with pytest.raises(InfrastructureFault, match="slow"):
            await b.dispatcher.call("echo", ask(), deadline=0.3)
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_call_nobody_can_serve_ends_at_its_deadline_and_says_so(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        with pytest.raises(InfrastructureFault, match="no free worker"):
            await b.dispatcher.call("echo", ask(), deadline=0.2)


async def test_a_deadline_names_the_workers_that_are_full_or_rest_and_those_that_hang(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        await b.work("hanger", {"echo": hang}, capacity=1)
        for state in ["hanger"] * 5 + ["hanger rests after 5 failed calls"]:
            with pytest.raises(InfrastructureFault, match=f"echo took over 0.1 s .*{state}"):
                await b.dispatcher.call("echo", ask(), deadline=0.1)


async def test_a_call_that_waited_for_a_full_worker_says_how_full(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("full", {"echo": hang}, capacity=1)
        held, waits = (
            asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=d)) for d in (60, 0.2)
        )
        with pytest.raises(
            InfrastructureFault, match="no free worker: full has 1 requests in flight of at most 1"
        ):
            await waits
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_cancelling_the_caller_reaches_the_worker_and_frees_its_room(tmp_path: Path) -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def watch(request: EchoRequest, call: Call) -> EchoResult:
        if request.tokens[0] == 1:
            return EchoResult(request.tokens, 0)
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with bench(tmp_path) as b:
        await b.work("w", {"echo": watch}, capacity=1)
        caller = asyncio.create_task(b.dispatcher.call("echo", ask(0), deadline=60))
        await asyncio.wait_for(entered.wait(), 5)
        caller.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        await b.dispatcher.call("echo", ask(1), deadline=5)


async def test_the_calls_of_a_worker_that_dies_move_to_another(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def stuck(request: Any, call: Call) -> Any:
        entered.set()
        await asyncio.Event().wait()

    async with bench(tmp_path, QUICK) as b:
        await b.work("mortal", {"echo": stuck})
        caller = asyncio.create_task(b.dispatcher.call("echo", ask(5), deadline=30))
        await asyncio.wait_for(entered.wait(), 5)
        await b.work("heir", {"echo": echo})
        await b.kill("mortal")
        assert (await caller).tokens.tolist() == [10]
        assert b.dispatcher.counters["dead_workers"] == 1


async def test_a_call_runs_where_its_place_says_and_the_place_learns_of_every_attempt(
    tmp_path: Path,
) -> None:
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


class Ranked(Place):
    """Held back until ``free`` is set; noted when it starts."""

    def __init__(self, rank: int, started: list[int], free: asyncio.Event):
        self.number, self.order, self.free = rank, started, free

    def rank(self) -> tuple[int, ...]:
        return (self.number,)

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        return super().choose(loads, avoid) if self.free.is_set() else None

    def started(self, worker: str) -> None:
        self.order.append(self.number)


async def test_waiting_calls_start_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    started: list[int] = []
    free = asyncio.Event()
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo}, capacity=1)
        places = [Ranked(rank, started, free) for rank in (3, 1, 2, 0)]
        calls = [
            asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=10, place=p))
            for p in places
        ]
        await asyncio.sleep(0)
        free.set()
        b.dispatcher.look_again("echo")
        await asyncio.gather(*calls)
    assert started == [0, 1, 2, 3]


async def test_a_call_that_is_held_back_stops_no_other_and_is_tried_again_by_itself(
    tmp_path: Path,
) -> None:
    started: list[int] = []
    held, free = asyncio.Event(), asyncio.Event()
    free.set()
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo})
        waits = asyncio.create_task(
            b.dispatcher.call("echo", ask(), deadline=10, place=Ranked(0, started, held))
        )
        await asyncio.sleep(0)
        await b.dispatcher.call("echo", ask(), deadline=10, place=Ranked(1, started, free))
        await b.dispatcher.call("echo", ask(), deadline=10)
        assert started == [1]
        held.set()  # nobody tells the dispatcher
        await waits
    assert started == [1, 0]


async def test_a_held_call_still_ends_at_its_deadline_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo})
        with pytest.raises(InfrastructureFault, match="took over"):
            await b.dispatcher.call(
                "echo", ask(), deadline=0.2, place=Ranked(0, [], asyncio.Event())
            )
        assert b.dispatcher.waiting() == {}


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

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        self.asked.append(self.number)
        return super().choose(loads, avoid)

    def started(self, worker: str) -> None:
        super().started(worker)
        self.begun.add(self.family)


async def test_of_calls_that_wait_together_one_is_asked_and_all_start_by_family(
    tmp_path: Path,
) -> None:
    asked, begun, started, free = list[int](), set[int](), list[int](), asyncio.Event()
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo}, capacity=1)
        places = [Kin(number, number % 20, asked, begun, started, free) for number in range(60)]
        calls = [
            asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=30, place=place))
            for place in places
        ]
        await asyncio.sleep(0)
        assert set(asked) == {0} and len(asked) <= 60
        free.set()
        b.dispatcher.look_again("echo")
        await asyncio.gather(*calls)
        assert len(asked) <= 60 + 60 + 5, (
            "each call is asked once when it starts (and the timer may ask the first again)"
        )
    assert started == [number + 20 * sibling for number in range(20) for sibling in range(3)]


async def test_calls_that_wait_and_are_cancelled_leave_the_queue_in_any_order(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as b:
        calls = [
            asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=30)) for _ in range(100)
        ]
        await asyncio.sleep(0)
        for call in calls[1::2] + calls[98::-2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert not b.dispatcher._waiting["echo"] and not b.dispatcher.open_calls()


async def test_a_worker_that_joins_a_run_at_its_end_is_asked_to_leave(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.dispatcher.drain()
        service = Service("late", {"echo": echo}, 1)
        await asyncio.wait_for(service.run(b.dispatcher.endpoint, b.keys, signals=False), 30)


@pytest.mark.slow
async def test_a_learner_that_holds_thousands_of_groups_still_hears_that_a_tree_has_closed(
    tmp_path: Path,
) -> None:
    async def train(group: TrainGroup, call: Call) -> Trained:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(closed: TreeClosed, call: Call) -> Closed:
        return Closed()

    async with bench(tmp_path) as b:
        await b.work("learner", {"train": train, "close": close}, UNBOUNDED)
        groups = [TrainGroup(number, 0, [], []) for number in range(4200)]  # the capacity was 4096
        open_calls = [
            asyncio.create_task(b.dispatcher.call("train", group, deadline=600)) for group in groups
        ]
        await asyncio.sleep(0)
        await b.dispatcher.call("close", TreeClosed(0, []), deadline=60)
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)


async def test_a_joining_worker_gets_no_work_before_its_hook_returns(tmp_path: Path) -> None:
    order: list[str] = []

    async def note(request: EchoRequest, call: Call) -> EchoResult:
        order.append("work")
        return EchoResult(request.tokens, 0)

    async with bench(tmp_path) as b:

        async def prepare(worker: Any) -> None:
            await b.dispatcher.call("load", ask(), deadline=5, worker=worker.name)
            order.append("prepared")

        async def load(request: Any, call: Call) -> Any:
            raise DataFault("never mind")

        async def joined(worker: Any) -> None:
            with pytest.raises(Fault):
                await prepare(worker)
            order.append("prepared")

        b.dispatcher.on_join = joined
        caller = asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=10))
        await b.work("w", {"echo": note, "load": load})
        await caller
    assert order == ["prepared", "work"]


async def test_a_draining_worker_finishes_its_calls_and_leaves(tmp_path: Path) -> None:
    entered, gate = asyncio.Event(), asyncio.Event()

    async def wait(request: EchoRequest, call: Call) -> EchoResult:
        entered.set()
        await gate.wait()
        return EchoResult(request.tokens, 0)

    async with bench(tmp_path) as b:
        service = await b.work("w", {"echo": wait})
        caller = asyncio.create_task(b.dispatcher.call("echo", ask(), deadline=10))
        await asyncio.wait_for(entered.wait(), 5)
        service.drain()
        gate.set()
        await caller
        await asyncio.wait_for(b.tasks["w"], 5)


async def test_every_call_has_exactly_one_outcome_among_workers_that_fail_hang_and_die(
    tmp_path: Path,
) -> None:
    rng = random.Random(0)

    async def moody(request: EchoRequest, call: Call) -> EchoResult:
        mood = rng.random()
        if mood < 0.15:
            raise InfrastructureFault("mood")
        if mood < 0.2:
            raise DataFault("mood")
        if mood < 0.25:
            await asyncio.Event().wait()
        await asyncio.sleep(rng.random() * 0.01)
        return EchoResult(request.tokens, 0)

    async with bench(tmp_path, QUICK) as b:
        for name in ("a", "b", "c"):
            await b.work(name, {"echo": moody}, capacity=8)

        async def one(index: int) -> str:
            try:
                result = await b.dispatcher.call("echo", ask(index), deadline=1.5)
            except Fault as fault:
                return fault.kind
            assert result.tokens.tolist() == [index]
            return "ok"

        calls = [asyncio.create_task(one(i)) for i in range(150)]
        await asyncio.sleep(0.05)
        await b.kill("b")
        outcomes = await asyncio.wait_for(asyncio.gather(*calls), 20)
        assert len(outcomes) == 150
        assert set(outcomes) <= {"ok", "data", "infrastructure"}
        assert outcomes.count("ok") > 75
        assert b.dispatcher.waiting() == {}
