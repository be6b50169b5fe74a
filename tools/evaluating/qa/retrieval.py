"""Cached retrieval: SQLite keeps answers by retriever, query and number of passages, for all rows
and resumed sessions.

Invariant: the backend is asked at most once per (retriever, topk, query), however many rows,
sessions or questions need the answer.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import msgspec

from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.hot import AT_ONCE, Backend, HotQueries
from coppice.judges.retriever.index import read_manifest
from coppice.judges.retriever.worker import is_served, opened
from coppice.tools.evaluating.in_process import NotStarted
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Passage, RetrieveRequest, RetrieveResult

_SCHEMA = """
CREATE TABLE IF NOT EXISTS passages (retriever TEXT, topk INTEGER, query TEXT, found BLOB,
    PRIMARY KEY (retriever, topk, query)) WITHOUT ROWID;
"""
_WAIT_S = 60.0
"""Seconds to wait while another evaluation writes to the same file."""

Open = Callable[[], AbstractAsyncContextManager[Backend]]
"""Opens the backend when the first query needs it."""


class CachedRetrieval:
    """The service ``retrieve`` until ``close``. identity: text that changes whenever answers may
    change."""

    def __init__(self, file: Path, identity: str, opening: Open):
        self.file, self.identity, self.opening = file, identity, opening
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            problem = f"is no file of found passages ({error})"
            raise NotStarted(f"--cache {file} {problem}: name another file") from None
        self._queries = 0
        self._hot = HotQueries(self, 0, at_once=AT_ONCE)
        self._gate = asyncio.Lock()
        self._backend: Backend | None = None
        self._open = AsyncExitStack()

    async def open(self) -> Backend:
        """The backend, ready to search. Raises NotStarted if its index or its encoder cannot be
        loaded."""
        async with self._gate:
            if self._backend is None:
                try:
                    self._backend = await self._open.enter_async_context(self.opening())
                except (OSError, ValueError, ImportError, MemoryError) as error:
                    reason = str(error).strip().split("\n")[0]
                    remedy = "build the index anew, or give another one"
                    raise NotStarted(f"--retriever: {reason}; {remedy}") from error
            return self._backend

    @property
    def counts(self) -> dict[str, int]:
        """The queries so far, and the hits: those for which the backend was not asked."""
        return {"queries": self._queries, "hits": self._queries - self._hot.counts["searched"]}

    async def handle(self, request: RetrieveRequest) -> RetrieveResult:
        """The passages of each query, best first."""
        self._queries += len(request.queries)
        kept = {query: self._kept(request.topk, query) for query in request.queries}
        missing = [query for query, passages in kept.items() if passages is None]
        kept |= zip(missing, await self._hot.search(missing, request.topk), strict=True)
        return RetrieveResult([kept[query] or [] for query in request.queries])

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Ask the backend, and write to the file what it finds."""
        found = await (await self.open()).search(queries, topk)
        encoded = map(msgspec.msgpack.encode, found)
        rows = [(self.identity, topk, *row) for row in zip(queries, encoded, strict=True)]
        try:
            self.db.executemany("INSERT OR REPLACE INTO passages VALUES (?,?,?,?)", rows)
        except sqlite3.Error as error:
            problem = f"{self.file} could not be written ({error})"
            raise InfrastructureFault(f"{problem}: free some space") from None
        return found

    def _kept(self, topk: int, query: str) -> list[Passage] | None:
        row = self.db.execute(
            "SELECT found FROM passages WHERE retriever=? AND topk=? AND query=?",
            (self.identity, topk, query),
        ).fetchone()
        return msgspec.msgpack.decode(row[0], type=list[Passage]) if row else None

    async def close(self) -> None:
        """Cancel the queries under way, and close the backend and the file."""
        await self._hot.close()
        await self._open.aclose()
        self.db.close()


def identity_of(retriever: str) -> str:
    """Text that names what answers: a server's URL, or an index's corpus and encoder. Raises
    ValueError or FileNotFoundError."""
    if is_served(retriever):
        return retriever.rstrip("/")
    if "://" in retriever:
        expected = "an index folder, an http(s):// URL, or default"
        raise ValueError(f"--retriever {retriever}: expected {expected}")
    try:
        manifest = read_manifest(Path(retriever))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--retriever {retriever}: {error}") from None
    corpus, size = manifest.corpus_sha256[:16], manifest.passages
    return f"index {corpus} of {size} passages by {manifest.encoder}"


def opening_of(retriever: str, threads: int) -> Open:
    """The function that opens the backend of --retriever."""
    encoder = "" if is_served(retriever) else read_manifest(Path(retriever)).encoder
    config = RetrieverConfig(retriever, encoder=encoder, threads=threads, cache=0)
    return lambda: opened(config)
