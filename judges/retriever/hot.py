"""What stands before a source of passages: a cache of hot queries, one search for equal queries,
and joined searches.

Invariant: a query (with its number of passages) that is kept or under way is not searched again.
"""

import asyncio
from collections import OrderedDict
from typing import Protocol

from coppice.wire.faults import DataFault
from coppice.wire.messages import TOPK_MOST, Passage, RetrieveRequest, RetrieveResult
from coppice.wire.service import Call

Key = tuple[str, int]
AT_ONCE = 64
"""Queries under way at one server that takes several searches at once, as many as a retriever
process serves."""


class Backend(Protocol):
    """The source of passages."""

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]: ...


class HotQueries:
    """Passes queries on to ``backend``. size: queries kept, the least recently used leave first.
    batch: queries joined into one search. at_once: searches of the backend at once; what is asked
    meanwhile waits and is joined.

    A query:  new -> waiting -> searched -> kept -> dropped, or -> failed: all who wait get the
    error, and the next one to ask begins again.

    searched: how many queries went to the backend; all others were kept or under way."""

    def __init__(self, backend: Backend, size: int, batch: int = 32, at_once: int = 1):
        self.backend, self.size, self.batch, self.at_once = backend, size, batch, at_once
        self.kept: OrderedDict[Key, asyncio.Future[list[Passage]]] = OrderedDict()
        self.searched = 0
        self._open: dict[Key, asyncio.Future[list[Passage]]] = {}
        self._waiting: dict[int, list[str]] = {}
        self._searches: set[asyncio.Task[dict[Key, list[Passage]]]] = set()

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return the ``topk`` passages of each query, best first. A cancelled caller cancels no
        search."""
        answers = [self._answer((query, topk)) for query in queries]
        self._begin()
        if pending := {answer for answer in answers if not answer.done()}:
            await asyncio.wait(pending)
        return [answer.result() for answer in answers]

    def _answer(self, key: Key) -> asyncio.Future[list[Passage]]:
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        if key not in self._open:
            self.searched += 1
            self._open[key] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key[1], []).append(key[0])
        return self._open[key]

    def _begin(self) -> None:
        """Start searches while there is room. Numbers of passages take turns."""
        while self._waiting and len(self._searches) < self.at_once:
            topk = next(iter(self._waiting))
            queries = self._waiting.pop(topk)
            if rest := queries[self.batch :]:
                self._waiting[topk] = rest
            keys = [(query, topk) for query in queries[: self.batch]]
            task = asyncio.get_running_loop().create_task(self._found(keys))
            self._searches.add(task)
            task.add_done_callback(lambda task, keys=keys: self._ended(task, keys))

    async def _found(self, keys: list[Key]) -> dict[Key, list[Passage]]:
        passages = await self.backend.search([query for query, _ in keys], keys[0][1])
        return dict(zip(keys, passages, strict=True))

    def _ended(self, task: asyncio.Task[dict[Key, list[Passage]]], keys: list[Key]) -> None:
        self._searches.discard(task)
        for key in keys:
            answer = self._open.pop(key)
            if task.cancelled():
                answer.cancel()
            elif error := task.exception():
                answer.set_exception(error)
                answer.exception()  # seen, even if nobody waits any more
            else:
                answer.set_result(task.result()[key])
                self.kept[key] = answer
        while len(self.kept) > self.size:
            self.kept.popitem(last=False)
        self._begin()

    async def close(self) -> None:
        """Cancel the searches under way, and with them what waits for them."""
        self._waiting.clear()
        for task in self._searches:
            task.cancel()
        await asyncio.gather(*self._searches, return_exceptions=True)

    async def handle(self, request: RetrieveRequest, call: Call) -> RetrieveResult:
        """Handle a request of the service ``retrieve``. Raises DataFault for another topk."""
        if not 1 <= request.topk <= TOPK_MOST:
            raise DataFault(f"topk {request.topk}: expected 1 to {TOPK_MOST}")
        return RetrieveResult(await self.search(request.queries, request.topk))
