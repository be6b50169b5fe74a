"""The scheduler's processor time for a call, with one worker and with 10,000, with and without
places.

There are no sockets and no peers' work in it: a transport in this process answers each request with
the same frames, first in, first out. So what is measured is the dispatcher, the placement and the
event loop, and a ratio is not flattered by a constant part. Rounds alternate.
"""

import asyncio
import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coppice.common import loop
from coppice.common.numbers import Count
from coppice.research.benches import result
from coppice.scheduler.dispatch.calls import Place
from coppice.scheduler.dispatch.dispatcher import DispatchConfig, Dispatcher
from coppice.scheduler.dispatch.placement import CAPACITY, Fleet, Generation
from coppice.scheduler.garbage import sparing
from coppice.wire import messages as wire
from coppice.wire.arrays import Frame, decode_header, encode, encode_body
from coppice.wire.keys import Grant, RunKeys

SIZES = {
    "1 worker, 64 open calls": (1, 64, 64),
    "10,000 workers, 20,000 open calls": (10_000, 4, 20_000),
    "10,000 workers, 100,000 open calls": (10_000, 4, 100_000),
}
"""Workers, calls that each takes at once, callers that each have one call open."""
SERVICE = "judge.noop"
SENTENCE = (
    "The city of Ghent lies where the Scheldt meets the Lys and was once the largest north of the"
    " Alps. "
)
REQUEST = wire.JudgeRequest(
    [
        wire.JudgedTurn(
            question="Which river meets the Scheldt in Ghent?", golds=["Lys"], context=SENTENCE * 6,
            response=f"<think> {SENTENCE} </think> <search> rivers of Ghent </search>", step=2,
            budget=4, think=SENTENCE, query="rivers of Ghent", observation=SENTENCE * 3,
            past_queries=["Ghent"],
        )
    ]
)  # fmt: skip
"""One turn of a SLATE tree, about 1.5 kB."""
ANSWER = wire.JudgeResult([wire.Judgement({"think": 1.0, "query": 0.0}, explanation="no-op")])
GROWTH, TURNS, SHARED = 40, 4, 100
"""Tokens that a tree's prompt grows by at a call, the calls of a tree, and the tokens that all
prompts begin with."""


class AnsweringTransport:
    """A transport whose peers answer at once. answers: frames of an answer's body, by service."""

    endpoint, sender = "inproc", ""

    def __init__(self) -> None:
        self.keys: RunKeys | None = None
        self.answers: dict[str, list[Frame]] = {}
        self._requests = deque[tuple[Frame, int, str]]()
        self._deliver: Callable[[list[Frame]], None] = lambda frames: None

    def grant(self, public: str) -> Grant | None:
        """Everything may be offered."""
        return Grant("bench", ("judge", "generate", "retrieve"))

    def listen(self, deliver: Callable[[list[Frame]], None]) -> asyncio.Future[None]:
        """Deliver answers to the dispatcher from now on."""
        self._deliver = deliver
        return asyncio.get_running_loop().create_future()

    def send(self, frames: Iterable[Frame]) -> bool:
        """Answer a request in the next turn of the event loop."""
        identity, *parts = frames
        header = decode_header(parts)
        if isinstance(header, wire.Request):
            self._requests.append((identity, header.id, header.service))
            asyncio.get_running_loop().call_soon(self._answer)
        return True

    def _answer(self) -> None:
        identity, number, service = self._requests.popleft()
        self._deliver([identity, encode(wire.Result(number))[0], *self.answers[service]])

    def say(self, identity: bytes, message: Any) -> None:
        """Deliver a message of a peer."""
        self._deliver([identity, *encode(message)])

    def close(self) -> None:
        """Nothing is open."""


def generated() -> wire.GenerateResult:
    """The answer to a generate call."""
    tokens, zeros = np.arange(GROWTH // 2, dtype=np.int32), np.zeros(GROWTH // 2, np.float32)
    sample = wire.Sample(tokens, zeros, zeros.astype(np.int32), finish="stop")
    return wire.GenerateResult([sample], prompt_tokens=SHARED, cached_tokens=SHARED)


class Callers:
    """Callers that have one call open each, without an end; with ``fleet`` each grows trees, one
    after the other. done: calls that have returned."""

    def __init__(self, dispatcher: Dispatcher, fleet: Fleet | None):
        self.dispatcher, self.fleet = dispatcher, fleet
        self.done = 0
        self._trees = itertools.count()

    async def call(self) -> None:
        """Call again and again."""
        while True:
            if self.fleet is None:
                await self.dispatcher.call(SERVICE, REQUEST, deadline=3600.0)
                self.done += 1
            else:
                await self._tree(self.fleet, next(self._trees))

    async def _tree(self, fleet: Fleet, tree: int) -> None:
        tokens = np.arange(SHARED + GROWTH * TURNS, dtype=np.int32)
        tokens[SHARED:] += 1000 + tree % 100_000 * GROWTH * TURNS
        for turn in range(1, TURNS + 1):
            request = wire.GenerateRequest(
                tokens[: SHARED + GROWTH * turn], 1, wire.Sampling(max_tokens=GROWTH)
            )
            place: Place = Generation(fleet, tree, request)
            await self.dispatcher.call("generate", request, deadline=3600.0, place=place)
            self.done += 1
        fleet.ended(tree)


async def measure(
    workers: int, capacity: int, callers: int, placed: bool, calls: int,
    meter: Callable[[], float] = time.process_time,
) -> float:  # fmt: skip
    """Return what a call costs by ``meter``, over ``calls`` calls after as many that are not
    counted: by default seconds of processor time."""
    transport: Any = AnsweringTransport()
    service = "generate" if placed else SERVICE
    transport.answers[service] = encode_body(generated() if placed else ANSWER)
    dispatcher = Dispatcher("", None, DispatchConfig(dead_after_s=3600.0), router=transport)
    await dispatcher.start()
    for number in range(workers):
        identity = b"%d" % number
        transport.say(identity, wire.Register(f"w{number}", [service], capacity, 1, "here"))
        transport.say(identity, wire.Heartbeat(0, {CAPACITY: 1e5}))
    await dispatcher.wait_for(service, workers, 60.0)
    calling = Callers(dispatcher, Fleet() if placed else None)
    tasks = [asyncio.create_task(calling.call()) for _ in range(callers)]
    try:
        while calling.done < max(calls, callers):  # every caller has called once
            await asyncio.sleep(0.01)
        gc.collect()
        before, began = calling.done, meter()
        while calling.done < before + calls:
            await asyncio.sleep(0.01)
        return (meter() - began) / (calling.done - before)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await dispatcher.close()


def run(calls: Count = 10_000, rounds: Count = 3) -> dict[str, Any]:
    """Return the largest ratio of a call's cost to that with one worker, and all costs in
    microseconds (medians over the rounds)."""
    spent: dict[tuple[str, bool], list[float]] = {
        (name, placed): [] for name in SIZES for placed in (False, True)
    }
    for _ in range(rounds):
        for (name, placed), costs in spent.items():
            with sparing():
                costs.append(1e6 * loop.run(measure(*SIZES[name], placed, calls)))
    cost = {key: statistics.median(costs) for key, costs in spent.items()}
    first = next(iter(SIZES))
    dearest = max(us / cost[first, placed] for (_, placed), us in cost.items())
    us = {f"us: {name}{', placed' if placed else ''}": us for (name, placed), us in cost.items()}
    return result(
        "processor time of a call, the dearest size / one worker", dearest, 1.5, "lower", **us
    )
