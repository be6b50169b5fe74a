"""Cached retrieval: SQLite keeps answers by retriever, query and number of passages, for all rows
and resumed sessions.

Invariant: the backend is asked at most once per (retriever, topk, query), however many rows,
sessions or questions need the answer.
"""

import asyncio
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.hot import HotQueries
from coppice.judges.retriever.index import read_manifest
from coppice.judges.retriever.worker import is_served, opened
from coppice.tools.evaluating.in_process import NotStarted
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Passage, RetrieveRequest, RetrieveResult

_SCHEMA = """
CREATE TABLE IF NOT EXISTS passages (retriever TEXT, topk INTEGER, query TEXT, found BLOB,
    PRIMARY KEY (retriever, topk, query)) WITHOUT ROWID;
"""
_KEPT = "SELECT found FROM passages WHERE retriever=? AND topk=? AND query=?"
_WAIT_S = 60.0
"""Seconds to wait while another evaluation writes to the same file."""


class CachedRetrieval:
    """The service ``retrieve`` until ``close``. identity: text that changes whenever answers may
    change. config: of the backend, which is opened when the first query needs it."""

    def __init__(self, file: Path, identity: str, config: RetrieverConfig):
        self.file, self.identity, self.config = file, identity, config
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None)
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            problem = f"is no file of found passages ({error})"
            raise NotStarted(f"--cache {file} {problem}: name another file") from None
        self.queries, self.gate = 0, asyncio.Lock()
        self.backend: HotQueries | None = None
        self.opened = AsyncExitStack()

    async def open(self) -> HotQueries:
        """The backend, ready to search. Raises NotStarted if its index or its encoder cannot be
        loaded."""
        async with self.gate:
            if self.backend is None:
                try:
                    self.backend = await self.opened.enter_async_context(opened(self.config))
                except (OSError, ValueError, ImportError, MemoryError) as error:
                    reason = str(error).strip().split("\n")[0]
                    remedy = "build the index anew, or give another one"
                    raise NotStarted(f"--retriever: {reason}; {remedy}") from error
            return self.backend

    @property
    def counts(self) -> dict[str, int]:
        """The queries so far, and the hits: those for which the backend was not asked."""
        searched = self.backend.searched if self.backend is not None else 0
        return {"queries": self.queries, "hits": self.queries - searched}

    async def handle(self, request: RetrieveRequest) -> RetrieveResult:
        """The passages of each query, best first."""
        self.queries += len(request.queries)
        kept: dict[str, list[Passage]] = {}
        for query in request.queries:
            key = (self.identity, request.topk, query)
            if row := self.db.execute(_KEPT, key).fetchone():
                kept[query] = msgspec.msgpack.decode(row[0], type=list[Passage])
        if missing := [query for query in request.queries if query not in kept]:
            found = await (await self.open()).search(missing, request.topk)
            kept |= zip(missing, found, strict=True)
            pairs = zip(missing, map(msgspec.msgpack.encode, found), strict=True)
            rows = [(self.identity, request.topk, *pair) for pair in pairs]
            try:
                self.db.executemany("INSERT OR REPLACE INTO passages VALUES (?,?,?,?)", rows)
            except sqlite3.Error as error:
                problem = f"{self.file} could not be written ({error})"
                raise InfrastructureFault(f"{problem}: free some space") from None
        return RetrieveResult([kept[query] for query in request.queries])

    async def close(self) -> None:
        """Cancel the queries under way, and close the backend and the file."""
        if self.backend is not None:
            await self.backend.close()
        await self.opened.aclose()
        self.db.close()


def config_of(retriever: str, threads: int, search: str = "") -> tuple[RetrieverConfig, str]:
    """The settings of a server's URL or an index folder, and a text that names what answers: the
    URL, or the index's corpus, encoder, kind and search parameters. Raises ValueError or
    FileNotFoundError."""
    config = RetrieverConfig(retriever, encoder="", threads=threads, search=search, cache=0)
    if is_served(retriever):
        return config, retriever.rstrip("/")
    if "://" in retriever:
        expected = "an index folder, an http(s):// URL, or default"
        raise ValueError(f"--retriever {retriever}: expected {expected}")
    try:
        of = read_manifest(Path(retriever))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--retriever {retriever}: {error}") from None
    kind = f"{of.kind} {search or of.search}".strip()
    name = f"index {of.corpus_sha256[:16]} of {of.passages} passages by {of.encoder}, {kind}"
    return msgspec.structs.replace(config, encoder=of.encoder), name
