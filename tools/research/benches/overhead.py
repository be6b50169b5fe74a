"""The cost of messaging: no-op judge calls through wire and dispatch against a bare pyzmq echo of the same payload.

Both sides run two processes under uvloop over loopback TCP without CURVE and keep the same number of calls in flight. The echo
does the least possible work: it neither decodes, nor routes, nor keeps deadlines. Rounds alternate, so that other load on the
machine meets both sides. The ratio is the median over rounds.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from scheduler.dispatch import Dispatcher
from tools.bootstrap import ROOT
from wire import loop
from wire.messages import JudgedTurn, Judgement, JudgeRequest, JudgeResult
from wire.numbers import Count
from wire.service import Call, Service

SERVICE = "judge.noop"
SENTENCE = "The city of Ghent lies where the Scheldt meets the Lys and was once the largest north of the Alps. "
REQUEST = JudgeRequest(
    [
        JudgedTurn(
            question="Which river meets the Scheldt in Ghent?",
            golds=["Lys"],
            context=SENTENCE * 6,
            response=f"<think> {SENTENCE} </think> <search> rivers of Ghent </search>",
            step=2,
            budget=4,
            think=SENTENCE,
            query="rivers of Ghent",
            observation=SENTENCE * 3,
            past_queries=["Ghent"],
        )
    ]
)
"""One turn of a SLATE tree, about 1.5 kB."""
ANSWER = JudgeResult([Judgement({"think": 1.0, "query": 0.0}, explanation="no-op")])


async def _no_op(request: JudgeRequest, call: Call) -> JudgeResult:
    return ANSWER


async def serve(endpoint: str, concurrency: int) -> None:
    """Answer no-op judge calls. Runs in a process of its own."""
    await Service("noop", {SERVICE: _no_op}, concurrency).run(endpoint, None)


async def echo(endpoint: str, _: int) -> None:
    """Send every message back. Runs in a process of its own."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    await socket.send_multipart([b"hello"])
    while True:
        await socket.send_multipart(await socket.recv_multipart())


@contextlib.asynccontextmanager
async def _child(role: str, endpoint: str, concurrency: int) -> AsyncIterator[None]:
    code = (
        f"from tools.research.benches import overhead; overhead.loop.run(overhead.{role}({endpoint!r}, {concurrency}))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


class _Echo:
    """The bare side: one coroutine that keeps the same number of messages in flight."""

    def __init__(self, socket: zmq.asyncio.Socket, peer: bytes):
        self.socket, self.peer = socket, peer
        self.payload = msgspec.msgpack.encode(REQUEST)

    async def rate(self, calls: int, concurrency: int) -> float:
        """Return the echoes per second."""
        start = time.perf_counter()
        for number in range(concurrency):
            await self.socket.send_multipart([self.peer, str(number).encode(), self.payload])
        for number in range(calls):
            await self.socket.recv_multipart()
            if number < calls - concurrency:
                await self.socket.send_multipart([self.peer, str(number).encode(), self.payload])
        return calls / (time.perf_counter() - start)


async def _call_rate(dispatcher: Dispatcher, calls: int, concurrency: int) -> float:
    left = calls

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await dispatcher.call(SERVICE, REQUEST, deadline=60.0)

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return calls / (time.perf_counter() - start)


async def measure(calls: int, concurrency: int, rounds: int) -> dict[str, float]:
    """Return the median rates of both sides (calls per second) and the median over rounds of their ratio."""
    dispatcher = Dispatcher("tcp://127.0.0.1:0", None)
    await dispatcher.start()
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    bare: list[float] = []
    ours: list[float] = []
    async with (
        _child("serve", dispatcher.endpoint, concurrency),
        _child("echo", f"tcp://127.0.0.1:{port}", concurrency),
    ):
        await dispatcher.wait_for(SERVICE, 1, 30.0)
        echo = _Echo(socket, (await socket.recv_multipart())[0])
        await _call_rate(dispatcher, calls // 10, concurrency)
        await echo.rate(calls // 10, concurrency)
        for _ in range(rounds):
            bare.append(await echo.rate(calls, concurrency))
            ours.append(await _call_rate(dispatcher, calls, concurrency))
    await dispatcher.close()
    zmq.asyncio.Context.instance().destroy(linger=0)
    return {
        "echo_calls_per_s": statistics.median(bare),
        "judge_calls_per_s": statistics.median(ours),
        "overhead_ratio": statistics.median(o / b for o, b in zip(ours, bare, strict=True)),
    }


def run(calls: Count = 10_000, concurrency: Count = 64, rounds: Count = 5) -> dict[str, Any]:
    """Return the rates of both sides and their ratio, whose goal is at least 0.5."""
    rates = loop.run(measure(calls, concurrency, rounds))
    row = {"name": "no-op judge calls/s, dispatch / bare ZeroMQ echo", "ratio": rates["overhead_ratio"]}
    return row | {"goal": 0.5, "better": "higher"} | rates
