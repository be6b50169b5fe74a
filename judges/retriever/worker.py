"""The retriever as a worker: it offers ``retrieve`` over a local index or a Search-R1 server and caches queries.

``python -m judges.retriever.worker PROCESS.json``
"""

import asyncio
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from judges.serve import connection
from wire import loop
from wire.faults import DataFault
from wire.messages import Passage, RetrieveRequest, RetrieveResult
from wire.process import begin
from wire.service import Call, Service


class RetrieverProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a retriever process. backend: an index folder or the http(s) URL of a Search-R1 server. cache: queries to keep."""

    name: str
    run: str
    backend: str
    encoder: str = "minilm"
    threads: int = 1
    cache: int = 65536


class Backend(Protocol):
    """The source of passages."""

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]: ...


class LocalBackend:
    """An index in this process. Searches run on a thread of their own, so that heartbeats go on."""

    def __init__(self, folder: Path, encoder: str, threads: int):
        from judges.retriever.encoder import Encoder
        from judges.retriever.index import Index

        self._index = Index(folder, Encoder(encoder, threads))
        self._thread = ThreadPoolExecutor(1)

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._index.search, queries, topk)


@asynccontextmanager
async def opened(backend: str, encoder: str, threads: int) -> AsyncIterator[Backend]:
    """Open the index folder or the Search-R1 server that ``backend`` names, and close it at the end."""
    if backend.startswith(("http://", "https://")):
        from judges.retriever.http_client import SearchR1Client

        async with SearchR1Client(backend) as client:
            yield client
    else:
        yield await asyncio.to_thread(LocalBackend, Path(backend), encoder, threads)


class Retriever:
    """Answers ``retrieve`` requests from ``backend`` through a least-recently-used cache of ``cache`` queries."""

    def __init__(self, backend: Backend, cache: int):
        self.backend, self.size = backend, cache
        self.cache: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._searching, self._since = 0, 0.0

    async def handle(self, request: RetrieveRequest, call: Call) -> RetrieveResult:
        """Handle a request of the service. Raises DataFault for a topk below 1."""
        if request.topk < 1:
            raise DataFault(f"topk {request.topk}: expected at least 1")
        # The cached passages are taken now, because the cache may have dropped them when the search returns.
        passages = {q: self.cache[(q, request.topk)] for q in request.queries if (q, request.topk) in self.cache}
        missing = sorted(set(request.queries) - set(passages))
        if missing:
            passages |= zip(missing, await self._search(missing, request.topk), strict=True)
        self.counts["queries"] += len(request.queries)
        self.counts["searched"] += len(missing)
        for query, row in passages.items():
            self.cache[(query, request.topk)] = row
            self.cache.move_to_end((query, request.topk))
        while len(self.cache) > self.size:
            self.cache.popitem(last=False)
        return RetrieveResult([passages[q] for q in request.queries])

    async def _search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return the backend's passages. A second in which several searches are open counts as busy once."""
        self._searching += 1
        if self._searching == 1:
            self._since = time.monotonic()
        try:
            return await self.backend.search(queries, topk)
        finally:
            self._searching -= 1
            if not self._searching:
                self.busy_s += time.monotonic() - self._since

    def stats(self) -> dict[str, float]:
        """Return counters for the heartbeat."""
        return {**self.counts, "busy_s": self.busy_s}


async def run(process: RetrieverProcess) -> None:
    """Serve until drained."""
    endpoint, keys = connection(Path(process.run), "retriever")
    async with opened(process.backend, process.encoder, process.threads) as backend:
        retriever = Retriever(backend, process.cache)
        await Service(process.name, {"retrieve": retriever.handle}, 64, retriever.stats).run(endpoint, keys)


def main() -> None:
    """Run the retriever process that the launcher starts."""
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RetrieverProcess)
    begin()
    loop.run(run(process))


if __name__ == "__main__":
    main()
