"""The services of an evaluation in one process, in the place of a run's dispatcher and workers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from coppice.actors.engines.base import Engine
from coppice.judges.base import Judge, Player, PlugIn, Speaker
from coppice.judges.serve import Batcher, answering
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateResult, Sample

Handler = Callable[[Any], Awaitable[Any]]


class NotStarted(RuntimeError):
    """The player could not be started, for example because the model does not fit or an API key is
    not set."""


class InProcess:
    """Serves ``generate`` by an engine, and judges, opponents and speakers by workers, through the
    dispatcher's ``call``. Call ``start`` first and ``close`` last.

    engine: None for a player without a model. more: handlers of other services.
    """

    def __init__(
        self, engine: Engine | None, workers: Sequence[PlugIn], more: Mapping[str, Handler] = {}
    ):
        self.engine, self.workers = engine, workers
        self.handlers: dict[str, Handler] = dict(more)
        if engine is not None:
            self.handlers["generate"] = engine.generate
        no_call: Any = None  # the handlers ignore it
        for worker in workers:
            assert isinstance(worker, Judge | Player | Speaker)
            handle = Batcher(worker).handle if isinstance(worker, Judge) else answering(worker)
            self.handlers[worker.service] = lambda one, handle=handle: handle(one, no_call)

    async def start(self) -> None:
        """Start engine and workers. Their errors pass through, such as MemoryError for a model that
        does not fit."""
        for one in (*([self.engine] if self.engine is not None else []), *self.workers):
            await one.start()

    async def close(self) -> None:
        for one in (*self.workers, *([self.engine] if self.engine is not None else [])):
            await one.close()

    async def call(self, service: str, request: Any, *, deadline: float, **_: Any) -> Any:
        """The answer of a service. Raises InfrastructureFault if the service does not exist or
        ``deadline`` seconds have passed."""
        if service not in self.handlers:
            there = sorted(self.handlers)
            raise InfrastructureFault(f"no {service} in this process: there are {there}")
        try:
            async with asyncio.timeout(deadline):
                return await self.handlers[service](request)
        except TimeoutError:
            raise InfrastructureFault(f"{service} gave no answer within {deadline:.0f} s") from None


class ResumedCalls:
    """The services as one task sees them. The samples ``said`` before an interruption come first;
    then ``generate``, or else the policy's engine, gives new ones.

    The opponent's moves follow from the game's seed, so the game repeats up to the interruption.
    """

    def __init__(self, services: InProcess, said: Sequence[Sample]):
        self.services, self.said = services, list(said)
        self.generate: Handler | None = None

    async def call(self, service: str, request: Any, **settings: Any) -> Any:
        if service == "generate" and self.said:
            return GenerateResult([self.said.pop(0)], len(request.tokens), 0)
        if service == "generate" and self.generate is not None:
            return await self.generate(request)
        return await self.services.call(service, request, **settings)
