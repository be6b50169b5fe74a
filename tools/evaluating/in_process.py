"""The services of an evaluation in one process. They take the place of a run's dispatcher and
workers."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from coppice.actors.engines.base import Engine
from coppice.actors.environments.base import Environment, Task
from coppice.judges.base import Judge, Player, PlugIn, Speaker
from coppice.judges.serve import Batcher, answering
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.evaluation.evaluation import BASELINES
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, Sample

PATIENCE_S = 3600.0
"""The deadline of a call. It is long because no other engine or service could take over from the
one in this process."""
Handler = Callable[[Any], Awaitable[Any]]


class NotStarted(RuntimeError):
    """The player could not be started, for example because the model does not fit or an API key is
    not set."""


class InProcess:
    """Serves ``generate`` by an engine, and judges, opponents and speakers by workers, through the
    dispatcher's ``call``.

    Call ``start`` first and ``close`` last. engine: None for a player without a model.
    more: handlers of other services.
    """

    def __init__(
        self, engine: Engine | None, workers: Sequence[PlugIn], more: Mapping[str, Handler] = {}
    ):
        self.engine, self.workers = engine, workers
        self.handlers: dict[str, Handler] = dict(more)
        if engine is not None:
            self.handlers["generate"] = engine.generate
        for worker in workers:
            self.handlers[worker.service] = _handling(worker)

    async def start(self) -> None:
        """Start the engine, then the workers. Their errors pass through, such as MemoryError for a
        model that does not fit."""
        if self.engine is not None:
            await self.engine.start()
        for worker in self.workers:
            await worker.start()

    async def close(self) -> None:
        """Release what ``start`` acquired."""
        for worker in self.workers:
            await worker.close()
        if self.engine is not None:
            await self.engine.close()

    async def call(self, service: str, request: Any, *, deadline: float, **_: Any) -> Any:
        """The answer of a service. Raises InfrastructureFault if the service does not exist or
        ``deadline`` seconds have passed."""
        if service not in self.handlers:
            raise InfrastructureFault(
                f"no {service} in this process: there are {sorted(self.handlers)}"
            )
        try:
            async with asyncio.timeout(deadline):
                return await self.handlers[service](request)
        except TimeoutError:
            raise InfrastructureFault(f"{service} gave no answer within {deadline:.0f} s") from None


def _handling(worker: PlugIn) -> Handler:
    assert isinstance(worker, Judge | Player | Speaker)
    handle = Batcher(worker).handle if isinstance(worker, Judge) else answering(worker)
    return lambda request: handle(request, None)  # pyright: ignore[reportArgumentType] (the handlers ignore their call)


def config_of(settings: Any, judge: str, **more: Any) -> SchedulerConfig:
    """The scheduler's settings for a player: one trajectory per task, with deadlines that allow
    slow services."""
    same = ("temperature", "top_p", "top_k", "thinking")
    return SchedulerConfig(
        judge=judge, max_action_tokens=settings.max_tokens, generate_deadline_s=PATIENCE_S,
        judge_deadline_s=PATIENCE_S, **{name: getattr(settings, name) for name in same}, **more,
    )  # fmt: skip


class Seat:
    """The services as one game sees them. The samples ``said`` before an interruption come first,
    then ``generate`` gives new ones.

    The opponent's moves follow from the game's seed, so the game repeats up to the interruption.
    """

    def __init__(
        self, services: InProcess, said: Sequence[Sample], generate: Handler | None = None
    ):
        self.services, self.said, self.generate = services, list(said), generate

    async def call(self, service: str, request: Any, **settings: Any) -> Any:
        """See ``InProcess.call``."""
        if service != "generate":
            return await self.services.call(service, request, **settings)
        if self.said:
            return GenerateResult([self.said.pop(0)], len(request.tokens), 0)
        if self.generate is not None:
            return await self.generate(request)
        return await self.services.call(service, request, **settings)


def without_model(
    name: str, environment: Environment, text: Text, task: Task, tree: Tree
) -> Handler:
    """The ``generate`` of player ``name`` in scheduler/evaluation/evaluation.py, who replies in the state at
    the tip of the tree."""
    rng = random.Random(f"{name}/{task.id}")

    async def generate(request: GenerateRequest) -> GenerateResult:
        state = environment.initial(task)  # a partner may speak before the tree has a state
        if tree.nodes and (kept := tree.tip().state):
            state = msgspec.convert(kept, type(state))
        tokens = text.encode(BASELINES[name](environment.replies(state), rng))
        sample = Sample(
            tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop"
        )
        return GenerateResult([sample], len(request.tokens), 0)

    return generate
