"""The event loop's lag at a rate of calls over real sockets, with and without a journal.

The dispatcher is real, the peers are raw sockets of another process that answer at once, and calls begin at a fixed rate whatever becomes of the
earlier ones (an open loop), so that a loop which cannot follow shows in the lag. With a journal, each answer adds a node to a tree and writes it, as a scored
action does; what one turn of the loop writes is one transaction.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from scheduler.dispatch import DispatchConfig, Dispatcher
from scheduler.fleet import CAPACITY
from scheduler.journal import Journal
from scheduler.tree import Tree
from tools.bootstrap import ROOT
from tools.research.benches.call_cost import generated
from tools.research.benches.overhead import ANSWER, REQUEST, SERVICE
from wire import loop
from wire.arrays import decode_header, encode, encode_body
from wire.messages import Heartbeat, Register, Request, Result
from wire.numbers import Count
from wire.process import many_files

SIZES = {1: 64, 16: 4, 256: 4, 1024: 4}
"""Workers, and the calls that each takes at once."""
TICK_S, LOOK_S, BEAT_S = 0.002, 0.005, 2.0
"""Seconds between two starts of calls, between two looks at the clock, and between two heartbeats of a worker."""
EACH = 2500
"""Workers of a process of peers: each takes two files, of which a process may have 20,000 or fewer."""
NODES, TOKENS = 60, 40
"""Nodes of a tree before the next one begins, and tokens of a node."""


def peers(endpoint: str, service: str, first: int, workers: int, capacity: int) -> None:
    """Answer calls on the sockets of ``workers`` workers, numbered from ``first``, in a process of its own, until killed."""
    many_files()
    context, poller = zmq.Context(), zmq.Poller()
    context.set(zmq.MAX_SOCKETS, workers + 8)
    sockets = []
    for number in range(first, first + workers):
        socket = context.socket(zmq.DEALER)
        socket.identity = f"peer-{number}/{os.getpid()}/0".encode()
        socket.connect(endpoint)
        socket.send_multipart(encode(Register(f"peer-{number}", [service], capacity, os.getpid(), "bench")))
        poller.register(socket, zmq.POLLIN)
        sockets.append(socket)
    body = encode_body(ANSWER if service == SERVICE else generated())
    echo, stats, beat = [0] * workers, {CAPACITY: 1e5}, time.monotonic() + BEAT_S
    place = {socket: number for number, socket in enumerate(sockets)}
    while True:
        for socket, _ in poller.poll(100):
            with contextlib.suppress(zmq.Again):
                while True:
                    match header := decode_header(socket.recv_multipart(zmq.DONTWAIT, copy=False)):
                        case Request():
                            socket.send_multipart([*encode(Result(header.id)), *body])
                        case Heartbeat():
                            echo[place[socket]] = header.echo
                        case _:
                            pass
        if time.monotonic() > beat:
            beat += BEAT_S
            for number, socket in enumerate(sockets):
                socket.send_multipart(encode(Heartbeat(0, stats, [], echo[number])))


@contextlib.asynccontextmanager
async def answering(endpoint: str, service: str, workers: int, capacity: int) -> AsyncIterator[None]:
    """Workers that offer ``service`` and answer at once, at most ``EACH`` of them in a process."""
    processes = []
    for first in range(0, workers, EACH):
        arguments = f"{endpoint!r}, {service!r}, {first}, {min(EACH, workers - first)}, {capacity}"
        code = f"from tools.research.benches import call_lag; call_lag.peers({arguments})"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        processes.append(await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment))
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()


class Journaled:
    """Writes each answer into the journal: a node of ``TOKENS`` tokens, in trees of ``NODES``."""

    def __init__(self, journal: Journal):
        self.journal, self._trees = journal, 0
        self._tree: Tree | None = None

    def write(self) -> None:
        """Add a node, as a scored action does."""
        if self._tree is None or len(self._tree.nodes) == NODES:
            self._tree, self._trees = Tree(self._trees, "bench", "train"), self._trees + 1
            self._tree.add(None, "prompt", np.arange(TOKENS, dtype=np.int32), "prompt")
            self.journal.start_tree(self._tree, self._tree.id, 0)
        zeros, root = np.zeros(TOKENS, np.float32), self._tree.nodes[0]
        node = self._tree.add(root, "action", np.arange(TOKENS, dtype=np.int32), "text", logprobs=zeros)
        node.scores.update({"think": 1.0, "query": 0.0})
        self._tree.changed[node.id] = node
        self.journal.save_nodes(self._tree)


@contextlib.asynccontextmanager
async def served(
    service: str, workers: int, capacity: int, journaled: bool
) -> AsyncIterator[tuple[Dispatcher, Callable[[], None]]]:
    """A dispatcher with ``workers`` that answer at once, and what has to be called for each answer: it writes the answer, if there is a journal."""
    dispatcher = Dispatcher("tcp://127.0.0.1:0", None, DispatchConfig(dead_after_s=600.0))
    await dispatcher.start()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        journal = Journal(Path(folder) / "journal.sqlite") if journaled else None
        if journal is not None:
            closing.callback(journal.close)
        async with answering(dispatcher.endpoint, service, workers, capacity):
            await dispatcher.wait_for(service, workers, 300.0)
            yield dispatcher, Journaled(journal).write if journal is not None else lambda: None
        await dispatcher.close()


def percentiles(lags: list[float]) -> dict[str, float]:
    """Return the lag's percentiles in milliseconds."""
    return {f"lag_p{share}": 1e3 * float(np.percentile(lags, share)) for share in (50, 99)}


async def watch(lags: list[float]) -> None:
    """Note how late the loop comes to a timer, in seconds, until cancelled."""
    while True:
        due = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lags.append(time.perf_counter() - due)


class _Load:
    """Calls at a rate, from ``run``'s start to its end. done: calls that have returned."""

    def __init__(self, dispatcher: Dispatcher, write: Callable[[], None]):
        self.dispatcher, self.write = dispatcher, write
        self.done, self.lags = 0, list[float]()
        self._open: set[asyncio.Task[None]] = set()

    async def run(self, rate: int, seconds: float) -> None:
        begun, started = time.perf_counter(), 0
        watching = asyncio.create_task(watch(self.lags))
        while (now := time.perf_counter() - begun) < seconds:
            for _ in range(int(now * rate) - started):
                task = asyncio.create_task(self._call())
                self._open.add(task)
                task.add_done_callback(self._open.discard)
                started += 1
            await asyncio.sleep(TICK_S)
        watching.cancel()

    async def end(self) -> None:
        """Wait for the calls that are still open."""
        await asyncio.gather(*self._open)

    async def _call(self) -> None:
        await self.dispatcher.call(SERVICE, REQUEST, deadline=300.0)
        self.done += 1
        self.write()


async def measure(workers: int, rate: int, seconds: float, journaled: bool) -> dict[str, float]:
    """Return calls a second, the lag's percentiles in milliseconds, microseconds of the scheduler's processor time a call, and its share of a core."""
    async with served(SERVICE, workers, SIZES[workers], journaled) as (dispatcher, write):
        load = _Load(dispatcher, write)
        await load.run(min(rate, 500), 0.5)  # a first run imports and connects
        load.done = 0
        load.lags.clear()
        begun, spent = time.perf_counter(), time.process_time()
        await load.run(rate, seconds)
        done, took, spent = load.done, time.perf_counter() - begun, time.process_time() - spent
        lags = load.lags
        await load.end()
    told = {"calls_s": done / took, "lag_max": 1e3 * max(lags), "us": 1e6 * spent / max(done, 1), "core": spent / took}
    return told | percentiles(lags)


def run(
    rates: tuple[Count, ...] = (1000, 2500, 5000), workers: tuple[Count, ...] = (1, 16, 256, 1024), seconds: Count = 10
) -> dict[str, Any]:
    """Measure every rate with every number of workers, without and with a journal. The ratio is the largest lag (99th percentile, milliseconds) of
    the highest rate over 20, the goal."""
    if unknown := set(workers) - set(SIZES):
        raise ValueError(f"workers = {sorted(unknown)}: expected of {sorted(SIZES)}")
    rows: dict[str, dict[str, float]] = {}
    print(
        "| workers | calls a second asked | journal | done | lag p50, ms | p99 | max | us a call | share of a core |\n|---|---|---|---|---|---|---|---|---|"
    )
    for count in workers:
        for rate in rates:
            for journaled in (False, True):
                row = rows[f"{count}/{rate}/{journaled}"] = loop.run(measure(count, rate, seconds, journaled))
                cells = f"{row['calls_s']:.0f} | {row['lag_p50']:.1f} | {row['lag_p99']:.1f} | {row['lag_max']:.0f} | {row['us']:.0f} | {row['core']:.2f}"
                print(f"| {count} | {rate} | {'yes' if journaled else 'no'} | {cells} |", flush=True)
    worst = max(row["lag_p99"] for key, row in rows.items() if key.split("/")[1] == str(max(rates)))
    return {
        "name": "lag of the loop at the highest rate, p99 / 20 ms",
        "ratio": worst / 20,
        "goal": 1.0,
        "better": "lower",
        "rows": rows,
    }
