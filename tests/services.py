"""A dispatcher and in-process workers over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coppice.scheduler.dispatch.calls import Place, Worker, roomy
from coppice.scheduler.dispatch.dispatcher import DispatchConfig, Dispatcher
from coppice.wire.keys import RunKeys
from coppice.wire.messages import SERVICES, Register
from coppice.wire.service import Call, Handler, Service


class EchoRequest(msgspec.Struct, frozen=True):
    tokens: np.ndarray


class EchoResult(msgspec.Struct, frozen=True):
    tokens: np.ndarray
    version: int


SERVICES["echo"] = (EchoRequest, EchoResult)


def ask(value: float = 1.0) -> EchoRequest:
    return EchoRequest(np.array([value], np.float32))


async def echo(request: EchoRequest, call: Call) -> EchoResult:
    return EchoResult(request.tokens, 0)


async def forever(request: Any, call: Call) -> Any:
    await asyncio.Event().wait()


def loaded(name: str, calls: int, capacity: int, stats: dict[str, float] | None = None) -> Worker:
    """A ready worker of that many open calls, without a process."""
    worker = Worker(name.encode(), Register(name, ["s"], capacity, 1, "here"), 0.0, "")
    worker.ready, worker.stats = True, stats or {}
    worker.in_flight = dict.fromkeys(range(calls))  # pyright: ignore[reportAttributeAccessIssue]
    return worker


class Prefer(Place):
    """On one worker while it has room."""

    def __init__(self, worker: str):
        self.worker = worker

    def choose(self, workers: Sequence[Worker], avoid: frozenset[str]) -> Worker | None:
        preferred = (worker for worker in roomy(workers, avoid) if worker.name == self.worker)
        return next(preferred, None) or super().choose(workers, avoid)


class Bench:
    """A started dispatcher; ``work`` adds workers. keys: a key that may offer everything."""

    def __init__(self, folder: Path, config: DispatchConfig):
        self.run_keys = RunKeys.create(folder / "keys")
        self.keys = self.run_keys.mint("tests", tuple(SERVICES))
        self.dispatcher = Dispatcher("tcp://127.0.0.1:0", self.run_keys, config)
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def work(self, name: str, handlers: dict[str, Handler], capacity: int = 4) -> Service:
        service = Service(name, handlers, capacity)
        self.tasks[name] = asyncio.create_task(
            service.run(self.dispatcher.endpoint, self.keys, signals=False)
        )
        async with asyncio.timeout(10):
            while name not in {w.name for w in self.dispatcher.workers()}:
                await asyncio.sleep(0.001)
        return service

    async def kill(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)


@asynccontextmanager
async def bench(folder: Path, config: DispatchConfig | None = None) -> AsyncIterator[Bench]:
    made = Bench(folder, config or DispatchConfig())
    await made.dispatcher.start()
    try:
        yield made
    finally:
        for name in made.tasks:
            await made.kill(name)
        await made.dispatcher.close()
