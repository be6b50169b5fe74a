"""Cached retrieval: SQLite keeps answers by retriever, query and number of passages, for all rows and resumed sessions.

Invariant: the backend is asked at most once per (retriever, topk, query), however many rows, sessions or questions need the answer.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import msgspec

from judges.retriever.hot import Backend
from judges.retriever.index import read_manifest
from judges.retriever.worker import is_served, opened
from tools.evaluating.folder import NotStarted
from wire.faults import InfrastructureFault
from wire.messages import Passage, RetrieveRequest, RetrieveResult

_SCHEMA = """
CREATE TABLE IF NOT EXISTS passages (
    retriever TEXT, topk INTEGER, query TEXT, found BLOB, PRIMARY KEY (retriever, topk, query)) WITHOUT ROWID;
"""
_WAIT_S = 60.0
"""Seconds to wait while another evaluation writes to the same file."""

Open = Callable[[], AbstractAsyncContextManager[Backend]]
"""Opens the backend when the first query needs it."""


class CachedRetrieval:
    """The service ``retrieve`` until ``close``. identity: text that changes whenever answers may change. counts: queries and hits."""

    def __init__(self, file: Path, identity: str, opening: Open):
        self.file, self.identity, self.opening = file, identity, opening
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise NotStarted(f"--cache {file} is no file of found passages ({error}): name another file") from None
        self.counts: Counter[str] = Counter()
        self._asking: dict[tuple[int, str], asyncio.Task[list[Passage]]] = {}
        self._gate = asyncio.Lock()
        self._backend: Backend | None = None
        self._open = AsyncExitStack()

    async def open(self) -> Backend:
        """The backend, ready to search. Raises NotStarted if its index or its encoder cannot be loaded."""
        async with self._gate:
            if self._backend is None:
                try:
                    self._backend = await self._open.enter_async_context(self.opening())
                except (OSError, ValueError, ImportError, MemoryError) as error:
                    reason = str(error).strip().split("\n")[0]
                    raise NotStarted(f"--retriever: {reason}; build the index anew, or give another one") from error
            return self._backend

    async def handle(self, request: RetrieveRequest) -> RetrieveResult:
        """The passages of each query, best first."""
        return RetrieveResult([await self._passages(query, request.topk) for query in request.queries])

    async def _passages(self, query: str, topk: int) -> list[Passage]:
        self.counts["queries"] += 1
        key = (topk, query)
        kept = self._kept(key)
        if kept is not None:
            self.counts["hits"] += 1
            return kept
        if key in self._asking:
            self.counts["hits"] += 1
        else:
            task = asyncio.create_task(self._ask(key))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(self._asking[key])  # a cancelled caller does not cancel the query for the others

    def _kept(self, key: tuple[int, str]) -> list[Passage] | None:
        row = self.db.execute(
            "SELECT found FROM passages WHERE retriever=? AND topk=? AND query=?", (self.identity, *key)
        ).fetchone()
        return msgspec.msgpack.decode(row[0], type=list[Passage]) if row else None

    async def _ask(self, key: tuple[int, str]) -> list[Passage]:
        topk, query = key
        backend = await self.open()
        (passages,) = await backend.search([query], topk)
        row = (self.identity, topk, query, msgspec.msgpack.encode(passages))
        try:
            self.db.execute("INSERT OR REPLACE INTO passages VALUES (?,?,?,?)", row)
        except sqlite3.Error as error:
            raise InfrastructureFault(f"{self.file} could not be written ({error}): free some space") from None
        return passages

    async def close(self) -> None:
        """Cancel the queries under way, and close the backend and the file."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._open.aclose()
        self.db.close()


def identity_of(retriever: str) -> str:
    """Text that names what answers: a server's URL, or an index's corpus and encoder. Raises ValueError or FileNotFoundError."""
    if is_served(retriever):
        return retriever.rstrip("/")
    if "://" in retriever:
        raise ValueError(f"--retriever {retriever}: expected an index folder, an http(s):// URL, or default")
    try:
        manifest = read_manifest(Path(retriever))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--retriever {retriever}: {error}") from None
    return f"index {manifest.corpus_sha256[:16]} of {manifest.passages} passages by {manifest.encoder}"


def opening_of(retriever: str, threads: int) -> Open:
    """The function that opens the backend of --retriever."""
    return lambda: opened(retriever, "" if is_served(retriever) else read_manifest(Path(retriever)).encoder, threads)
