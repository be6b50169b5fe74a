"""An actor process: it offers an engine as the services ``generate`` and ``load``.

``python -m coppice.actors.worker PROCESS.json``
"""

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from coppice.actors.config import ActorProcess
from coppice.actors.engines import base
from coppice.common import loop
from coppice.common.process import begin
from coppice.wire.faults import InfrastructureFault
from coppice.wire.keys import connection
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult
from coppice.wire.service import Call, Service

log = logging.getLogger("actors.worker")


def service(engine: base.Engine, name: str, capacity: int, spare: bool = False) -> Service:
    def stats() -> dict[str, float]:
        return {**engine.stats(), "spare": float(spare)}

    async def generate(request: GenerateRequest, call: Call) -> GenerateResult:
        return await engine.generate(request)

    async def load(request: LoadRequest, call: Call) -> LoadResult:
        loaded = await engine.load(request)
        told = "%s: policy version %d in force after %.2f s"
        log.info(told, name, loaded.version, loaded.seconds)
        return loaded

    return Service(name, {"generate": generate, "load": load}, capacity, stats)


async def run(process: ActorProcess) -> None:
    """Load the model and serve until drained. Raises InfrastructureFault when the engine dies."""
    engine = base.load(process)
    await engine.start()
    log.info("%s: %s served by %s", process.name, process.model, process.actors.engine)
    endpoint, keys = connection(Path(process.run), "actor")
    offered = service(engine, process.name, process.actors.capacity, process.spare)
    serving = asyncio.create_task(offered.run(endpoint, keys))
    gone = asyncio.create_task(engine.died())
    try:
        await asyncio.wait([serving, gone], return_when=asyncio.FIRST_COMPLETED)
        # the launcher starts this actor again, and the scheduler gives it the newest weights
        if not serving.done():
            raise InfrastructureFault(f"{process.name}: {gone.result()}")
        await serving
    finally:
        serving.cancel()
        gone.cancel()
        await engine.close()


def main() -> None:
    begin()
    loop.run(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ActorProcess)))


if __name__ == "__main__":
    main()
