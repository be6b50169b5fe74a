"""Every dispatched call reaches exactly one outcome: a result, a classified fault, or its caller's
cancellation."""

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coppice.common import loop
from coppice.scheduler.dispatch.dispatcher import DispatchConfig, Dispatcher, Event
from coppice.wire.faults import DataFault, Fault, InfrastructureFault, WireError
from coppice.wire.service import Call, Service
from tests.services import EchoRequest, EchoResult, bench

QUICK = DispatchConfig(heartbeat_s=0.05, dead_after_s=0.4)
DEADLINE_S = 0.5


def ask(value: float = 1.0) -> EchoRequest:
    return EchoRequest(np.array([value], np.float32))


async def echo(request: EchoRequest, call: Call) -> EchoResult:
    return EchoResult(request.tokens, 0)


async def forever(request: Any, call: Call) -> Any:
    await asyncio.Event().wait()


KINDS = ["ok", "ok", "slow", "infrastructure", "data", "crash", "malformed", "hang"]
PATIENCE = st.sampled_from(["stays", "stays", "stays", "cancels"])
PLANS = st.lists(st.tuples(st.sampled_from(KINDS), PATIENCE), min_size=1, max_size=40)
FATES = st.lists(st.sampled_from(["lives", "lives", "dies", "drains"]), min_size=1, max_size=3)


def harmless(plan: list[tuple[str, str]]) -> bool:
    """Whether no call of the plan fails by its own fault of infrastructure."""
    return all(kind in ("ok", "slow", "data") for kind, _ in plan)


async def act(request: EchoRequest, call: Call, plan: list[tuple[str, str]]) -> EchoResult:
    """What the plan says about this request, on whatever worker it is."""
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


async def outcomes(plan: list[tuple[str, str]], fates: list[str], folder: Path) -> Counter[str]:
    """Issue every call of the plan while workers meet their fates; count how the calls ended."""
    # Every worker but one may die or drain, and none of them costs a harmless call more than one
    # attempt.
    attempts, deadline = (len(fates) + 1, 30.0) if harmless(plan) else (2, DEADLINE_S)
    config = DispatchConfig(heartbeat_s=0.05, dead_after_s=0.2, max_attempts=attempts)
    dispatcher = Dispatcher(f"ipc://{folder}/scheduler", None, config)
    events: list[Event] = []
    dispatcher.on_event = events.append
    await dispatcher.start()

    async def handle(request: EchoRequest, call: Call) -> EchoResult:
        return await act(request, call, plan)

    services = [Service(f"w{i}", {"echo": handle}, 4) for i in range(len(fates) + 1)]
    tasks = [asyncio.create_task(s.run(dispatcher.endpoint, None, signals=False)) for s in services]
    await dispatcher.wait_for("echo", len(services), 10)

    async def one(index: int) -> str:
        try:
            result = await dispatcher.call("echo", ask(index), deadline=deadline)
        except Fault as fault:
            return fault.kind
        assert result.tokens.tolist() == [index], "an answer reached the wrong call"
        return "ok"

    callers = [asyncio.create_task(one(index)) for index in range(len(plan))]
    for _ in range(3):
        await asyncio.sleep(0)
    for caller, (_, patience) in zip(callers, plan, strict=True):
        if patience == "cancels":
            caller.cancel()
    for fate, service, task in zip(fates, services, tasks, strict=False):
        if fate == "dies":
            task.cancel()
        elif fate == "drains":
            service.drain()
    ended = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 20 * deadline)
    assert dispatcher.open_calls() == []
    assert all(not worker.in_flight for worker in dispatcher.workers())
    assert dispatcher.roster.failure is None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await dispatcher.close()
    lost = asyncio.CancelledError
    counted = Counter("cancelled" if isinstance(end, lost) else str(end) for end in ended)
    # A caller may be cancelled at the moment its answer comes; no other answer is ever lost or
    # given twice.
    answers = sum(event.outcome == "ok" for event in events)
    assert counted["ok"] <= answers <= counted["ok"] + counted["cancelled"]
    return counted


@pytest.mark.second
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    if harmless(plan):
        # dead and draining workers alone lose no call: one worker always stays
        assert not found["infrastructure"]


async def test_closing_ends_calls_that_run_that_wait_and_that_back_off(tmp_path: Path) -> None:
    entered = asyncio.Event()
    failed = asyncio.Event()

    async def first_fails(request: EchoRequest, call: Call) -> EchoResult:
        if request.tokens[0] == 0:
            raise InfrastructureFault("back off")
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with bench(tmp_path) as b:
        b.dispatcher.on_event = lambda event: failed.set()
        await b.work("w", {"echo": first_fails}, capacity=1)
        started = (b.dispatcher.call("echo", ask(value), deadline=60) for value in (0, 1, 2))
        calls = [asyncio.create_task(call) for call in started]
        await asyncio.wait_for(failed.wait(), 5)
        await asyncio.wait_for(entered.wait(), 5)
        await b.dispatcher.close()
        for call in calls:
            with pytest.raises(InfrastructureFault, match="closed"):
                await call
        with pytest.raises(InfrastructureFault, match="closed"):
            await b.dispatcher.call("echo", ask(), deadline=1)


async def test_an_answer_that_cannot_be_right_is_asked_of_another_worker(tmp_path: Path) -> None:
    async def wrong(request: EchoRequest, call: Call) -> EchoResult:
        return EchoResult(request.tokens - 5, 0)

    def check(answer: EchoResult) -> None:
        if answer.tokens[0] < 0:
            raise InfrastructureFault("a token below 0")

    async with bench(tmp_path) as b:
        await b.work("liar", {"echo": wrong})
        with pytest.raises(InfrastructureFault, match="liar answered a token below 0"):
            await b.dispatcher.call("echo", ask(), deadline=10, check=check)
        await b.work("honest", {"echo": echo})
        for _ in range(4):
            answer = await b.dispatcher.call("echo", ask(), deadline=10, check=check)
            assert answer.tokens.tolist() == [1.0]


async def test_attempts_are_bounded_and_the_last_fault_is_the_outcome(tmp_path: Path) -> None:
    async def never(request: EchoRequest, call: Call) -> EchoResult:
        raise InfrastructureFault("never")

    async with bench(tmp_path, DispatchConfig(max_attempts=2)) as b:
        await b.work("w", {"echo": never})
        with pytest.raises(InfrastructureFault, match="w: never"):
            await b.dispatcher.call("echo", ask(), deadline=10)
        assert b.dispatcher.counters["retries"] == 1


async def test_a_call_pinned_to_an_absent_worker_fails_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("here", {"echo": echo})
        with pytest.raises(InfrastructureFault, match=r"no worker 'gone' is here, only \['here'\]"):
            await b.dispatcher.call("echo", ask(), deadline=60, worker="gone")


async def test_a_request_that_cannot_be_sent_is_its_callers_error(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo})
        with pytest.raises(WireError, match="dtype"):
            await b.dispatcher.call("echo", EchoRequest(np.array(["text"])), deadline=5)
        with pytest.raises(WireError, match="unknown service 'sing'"):
            await b.dispatcher.call("sing", ask(), deadline=5)
        await b.dispatcher.call("echo", ask(), deadline=5)
        assert b.dispatcher.open_calls() == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (DataFault("no such page"), "^w: no such page$"),
        (InfrastructureFault("no luck"), "^echo took over 60.0 s on w, which answered: no luck$"),
    ],
)
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


@pytest.mark.second
async def test_a_rested_worker_is_used_again_after_its_rest(tmp_path: Path) -> None:
    left = [InfrastructureFault("not yet")] * 5

    async def late(request: EchoRequest, call: Call) -> EchoResult:
        if left:
            raise left.pop()
        return EchoResult(request.tokens, 0)

    config = DispatchConfig(heartbeat_s=0.1, dead_after_s=7200.0, max_attempts=10)
    async with bench(tmp_path, config) as b:
        await b.work("w", {"echo": late})
        (worker,) = b.dispatcher.workers()
        worker.breaker.rest_s = 0.2
        assert (await b.dispatcher.call("echo", ask(), deadline=60)).tokens.tolist() == [1.0]
        assert worker.breaker.open_until > 0


async def test_a_second_process_of_a_name_replaces_the_first(tmp_path: Path) -> None:
    left: list[str] = []
    async with bench(tmp_path) as b:
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


async def test_a_wait_for_workers_says_how_many_are_missing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("w", {"echo": echo})
        with pytest.raises(InfrastructureFault, match="1 of 2 workers for service 'echo'"):
            await b.dispatcher.wait_for("echo", 2, 0.05)


async def test_a_pinned_call_goes_through_to_a_full_worker(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def first_hangs(request: EchoRequest, call: Call) -> EchoResult:
        if request.tokens[0]:
            return EchoResult(request.tokens, 0)
        entered.set()
        return await forever(request, call)

    async with bench(tmp_path) as b:
        await b.work("w", {"echo": first_hangs}, capacity=1)
        held = asyncio.create_task(b.dispatcher.call("echo", ask(0), deadline=60))
        await asyncio.wait_for(entered.wait(), 5)
        await b.dispatcher.call("echo", ask(1), deadline=5, worker="w")
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
