"""The retriever as a worker, over a local index or Search-R1 servers: ``python -m
coppice.judges.retriever.worker PROCESS.json``."""

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from coppice.common import loop
from coppice.common.process import begin
from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.hot import AT_ONCE, HotQueries
from coppice.wire.keys import connection
from coppice.wire.messages import Passage
from coppice.wire.service import Service


class RetrieverProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a retriever process. retriever: its settings, with a backend."""

    name: str
    run: str
    retriever: RetrieverConfig


class LocalBackend:
    """An index in this process. Searches run on a thread of their own, so that heartbeats go on."""

    def __init__(self, config: RetrieverConfig):
        from coppice.judges.retriever.encoder import Encoder
        from coppice.judges.retriever.index import Index

        encoder = Encoder(config.encoder, config.threads)
        self._index = Index(Path(config.backend), encoder, config.search)
        self._thread = ThreadPoolExecutor(1)

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        event_loop = asyncio.get_running_loop()
        return await event_loop.run_in_executor(self._thread, self._index.search, queries, topk)


def is_served(backend: str) -> bool:
    """Return whether a backend is the URL of a server, or several of them."""
    return backend.startswith(("http://", "https://"))


@asynccontextmanager
async def opened(config: RetrieverConfig) -> AsyncIterator[HotQueries]:
    """Open the index folder or the Search-R1 servers that ``config.backend`` names, behind a cache,
    and close it at the end. Raises ValueError or OSError for an index that cannot be used."""
    if not is_served(config.backend):
        local = await asyncio.to_thread(LocalBackend, config)
        yield HotQueries(local, config.cache, config.batch)
        return
    if config.search:
        remedy = f"for {config.backend}: a server has its own; start it with them"
        raise ValueError(f"search parameters {config.search!r} {remedy}")
    from coppice.judges.retriever.http_client import RetrieverFleet, SearchR1Client

    urls = [url.strip() for url in config.backend.split(",") if url.strip()]
    async with AsyncExitStack() as stack:
        # where there is another server, it is asked before one is waited for
        attempts = 5 if len(urls) == 1 else 2
        enter = stack.enter_async_context
        clients = [await enter(SearchR1Client(url, attempts=attempts)) for url in urls]
        at_once = len(urls) * max(1, AT_ONCE // config.batch)
        yield HotQueries(RetrieverFleet(clients), config.cache, config.batch, at_once)


async def run(process: RetrieverProcess) -> None:
    """Serve until drained."""
    endpoint, keys = connection(Path(process.run), "retriever")
    async with opened(process.retriever) as queries:
        service = Service(process.name, {"retrieve": queries.handle}, AT_ONCE)
        await service.run(endpoint, keys)


def main() -> None:
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RetrieverProcess)
    begin()
    loop.run(run(process))


if __name__ == "__main__":
    main()
