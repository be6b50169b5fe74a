"""The retriever as a worker: it offers ``retrieve`` over a local index or Search-R1 servers, behind
``HotQueries``.

``python -m coppice.judges.retriever.worker PROCESS.json``
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from coppice.common import loop
from coppice.common.process import begin
from coppice.judges.retriever.hot import AT_ONCE, HotQueries
from coppice.judges.serve import connection
from coppice.wire.messages import Passage
from coppice.wire.service import Service


class RetrieverProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a retriever process. backend: an index folder, or the http(s) URLs of Search-R1
    servers, with commas between them. cache: queries to keep. search, batch: see
    ``RetrieverConfig``."""

    name: str
    run: str
    backend: str
    encoder: str = "minilm"
    threads: int = 1
    cache: int = 65536
    search: str = ""
    batch: int = 32


class LocalBackend:
    """An index in this process. Searches run on a thread of their own, so that heartbeats go on."""

    def __init__(self, folder: Path, encoder: str, threads: int, search: str = ""):
        from coppice.judges.retriever.encoder import Encoder
        from coppice.judges.retriever.index import Index

        self._index = Index(folder, Encoder(encoder, threads), search)
        self._thread = ThreadPoolExecutor(1)

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._index.search, queries, topk
        )


def is_served(backend: str) -> bool:
    """Return whether a backend is the URL of a server, or several of them."""
    return backend.startswith(("http://", "https://"))


@asynccontextmanager
async def opened(
    backend: str, encoder: str, threads: int, *, search: str = "", cache: int = 0, batch: int = 32
) -> AsyncIterator[HotQueries]:
    """Open the index folder or the Search-R1 servers that ``backend`` names, behind a cache of
    ``cache`` queries, and close it at the end.

    Raises ValueError or OSError, which name the remedy, for an index that cannot be used.
    """
    if is_served(backend) and search:
        raise ValueError(
            f"search parameters {search!r} for {backend}: a server has its own; start it with them"
        )
    if not is_served(backend):
        local = await asyncio.to_thread(LocalBackend, Path(backend), encoder, threads, search)
        yield HotQueries(local, cache, batch)
        return
    from coppice.judges.retriever.http_client import Fleet, SearchR1Client

    urls = [url.strip() for url in backend.split(",") if url.strip()]
    async with AsyncExitStack() as stack:
        # where there is another server, it is asked before one is waited for
        attempts = 5 if len(urls) == 1 else 2
        clients = [
            await stack.enter_async_context(SearchR1Client(url, attempts=attempts)) for url in urls
        ]
        yield HotQueries(Fleet(clients), cache, batch, len(urls) * max(1, AT_ONCE // batch))


async def run(process: RetrieverProcess) -> None:
    """Serve until drained."""
    endpoint, keys = connection(Path(process.run), "retriever")
    p = process
    async with opened(
        p.backend, p.encoder, p.threads, search=p.search, cache=p.cache, batch=p.batch
    ) as queries:
        await Service(p.name, {"retrieve": queries.handle}, AT_ONCE, queries.stats).run(
            endpoint, keys
        )


def main() -> None:
    """Run the retriever process that the launcher starts."""
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RetrieverProcess)
    begin()
    loop.run(run(process))


if __name__ == "__main__":
    main()
