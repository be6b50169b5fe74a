"""An actor process: it offers an engine as the services ``generate`` and ``load``.

``python -m actors.worker PROCESS.json``
"""

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from actors.config import ActorProcess
from actors.engines import registry
from actors.engines.base import Engine
from wire import loop
from wire.faults import InfrastructureFault
from wire.keys import PeerKeys
from wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult
from wire.process import begin
from wire.service import Call, Service

log = logging.getLogger("actors.worker")


def service(engine: Engine, name: str, capacity: int) -> Service:
    """Return the worker's service for an engine that was started."""

    async def generate(request: GenerateRequest, call: Call) -> GenerateResult:
        return await engine.generate(request)

    async def load(request: LoadRequest, call: Call) -> LoadResult:
        loaded = await engine.load(request)
        log.info("%s: policy version %d in force after %.2f s", name, loaded.version, loaded.seconds)
        return loaded

    return Service(name, {"generate": generate, "load": load}, capacity, engine.stats)


async def run(process: ActorProcess) -> None:
    """Load the model, then serve until drained. Raises InfrastructureFault when the engine dies before."""
    engine = registry.load(process)
    await engine.start()
    log.info("%s: %s served by %s", process.name, process.model, process.actors.engine)
    folder = Path(process.run)
    endpoint, keys = (folder / "endpoint").read_text().strip(), PeerKeys.load(folder / "keys", "actor")
    serving = asyncio.create_task(service(engine, process.name, process.actors.capacity).run(endpoint, keys))
    gone = asyncio.create_task(engine.died())
    try:
        await asyncio.wait([serving, gone], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # the launcher starts this actor again, and the scheduler gives it the newest weights
            raise InfrastructureFault(f"{process.name}: {gone.result()}")
        await serving
    finally:
        serving.cancel()
        gone.cancel()
        await engine.close()


def main() -> None:
    """Run the actor process that the launcher starts."""
    begin()
    loop.run(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ActorProcess)))


if __name__ == "__main__":
    main()
