"""Every dispatched call reaches exactly one outcome: a result, a classified fault, or its caller's
cancellation."""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coppice.common import loop
from coppice.scheduler.dispatch.calls import Place, Worker
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.wire.faults import DataFault, Fault, InfrastructureFault, WireError
from coppice.wire.service import Call, Service
from tests.services import Bench, EchoRequest, EchoResult, ask, bench, echo, forever

KINDS = ["ok", "ok", "slow", "infrastructure", "data", "crash", "malformed", "hang"]
PATIENCE = st.sampled_from(["stays", "stays", "stays", "cancels"])
PLANS = st.lists(st.tuples(st.sampled_from(KINDS), PATIENCE), min_size=1, max_size=40)
FATES = st.lists(st.sampled_from(["lives", "lives", "dies", "drains"]), min_size=1, max_size=3)


async def outcomes(plan: list[tuple[str, str]], fates: list[str], folder: Path) -> Counter[str]:
    """Issue every call of the plan while workers meet their fates; count how the calls ended."""

    async def act(request: EchoRequest, call: Call) -> EchoResult:
        match plan[int(request.tokens[0])][0]:
            case "slow":
                await asyncio.sleep(0.01)
            case "infrastructure":
                raise InfrastructureFault("planned")
            case "data":
                raise DataFault("planned")
            case "crash":
                raise ZeroDivisionError("planned")
            case "malformed":
                return request  # pyright: ignore[reportReturnType]
            case "hang":
                await asyncio.Event().wait()
        return EchoResult(request.tokens, 0)

    async def one(b: Bench, index: int) -> str:
        try:
            result = await b.dispatcher.call("echo", ask(index), deadline=0.5)
        except Fault as fault:
            return fault.kind
        assert result.tokens.tolist() == [index], "an answer reached the wrong call"
        return "ok"

    async with bench(folder, DispatchConfig(0.05, 0.2, max_attempts=2)) as b:
        services = [await b.work(f"w{i}", {"echo": act}) for i in range(len(fates) + 1)]
        callers = [asyncio.create_task(one(b, index)) for index in range(len(plan))]
        for _ in range(3):
            await asyncio.sleep(0)
        for caller, (_, patience) in zip(callers, plan, strict=True):
            if patience == "cancels":
                caller.cancel()
        for fate, service in zip(fates, services, strict=False):
            if fate == "dies":
                b.tasks[service.name].cancel()
            elif fate == "drains":
                service.drain()
        ended = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 10)
        assert b.dispatcher.open_calls() == []
        assert all(not worker.in_flight for worker in b.dispatcher.workers())
        assert b.dispatcher.roster.failure is None
    lost = asyncio.CancelledError
    return Counter("cancelled" if isinstance(end, lost) else str(end) for end in ended)


@pytest.mark.second
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS, FATES)
def test_every_dispatched_call_reaches_exactly_one_outcome(
    plan: list[tuple[str, str]], fates: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = loop.run(outcomes(plan, fates, Path(folder)))
    assert found.total() == len(plan)
    assert set(found) <= {"ok", "data", "infrastructure", "cancelled"}
    assert found["cancelled"] <= sum(patience == "cancels" for _, patience in plan)
    assert found["data"] <= sum(kind == "data" for kind, _ in plan)


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


async def test_a_call_nobody_can_serve_ends_at_its_deadline_and_says_so(b: Bench) -> None:
    with pytest.raises(InfrastructureFault, match="no free worker"):
        await b.dispatcher.call("echo", ask(), deadline=0.2)


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
