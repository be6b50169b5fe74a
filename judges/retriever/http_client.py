"""Clients of the Search-R1 retrieval protocol: POST /retrieve {"queries", "topk", "return_scores"}
(methods.md 1.8), and its passages: the quoted title, a newline, and the text."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coppice.common import jsonl
from coppice.common.http import JsonClient
from coppice.judges.retriever.hot import AT_ONCE, Backend
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Passage

_RESTS_S = 30.0
"""Seconds for which a server that failed is asked only when all others have failed too."""


def title_and_text(contents: str) -> tuple[str, str]:
    """Return the title (without quotes) and the text of a passage's ``contents``. This is the
    inverse of ``Passage.listed``."""
    title, _, text = contents.partition("\n")
    return title.strip().removeprefix('"').removesuffix('"'), text.strip()


class _Document(msgspec.Struct):
    contents: str
    id: str | int = ""


class _Scored(msgspec.Struct):
    document: _Document
    score: float

    def passage(self) -> Passage:
        return Passage(str(self.document.id), *title_and_text(self.document.contents), self.score)


class _Reply(msgspec.Struct):
    result: list[list[_Scored]]


class SearchR1Client:
    """Asks one server. It must be used as an async context manager. limits: those of
    ``common.http.JsonClient``."""

    def __init__(self, url: str, **limits: Any):
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        limits = {"timeout_s": 60.0, "attempts": 5, "concurrency": AT_ONCE} | limits
        self._client = JsonClient(self.url, **limits)

    async def __aenter__(self) -> "SearchR1Client":
        await self._client.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return the passages of each query, best first. Raises InfrastructureFault, which names
        the server and the cause."""
        body = {"queries": queries, "topk": topk, "return_scores": True}
        try:
            reply = await self._client.send("POST", "", body)
            rows = msgspec.json.decode(reply, type=_Reply).result
        except InfrastructureFault as fault:
            raise InfrastructureFault(f"retriever {fault}") from None
        except DataFault as fault:  # the server speaks another protocol and would answer no query
            raise InfrastructureFault(f"retriever {fault}: is it a Search-R1 server?") from None
        except jsonl.MALFORMED as error:
            cause = f"{type(error).__name__}: {error}"
            raise InfrastructureFault(f"retriever {self.url}: {cause}") from None
        if (given := len(rows)) != len(queries):
            cause = f"{given} results for {len(queries)} queries"
            raise InfrastructureFault(f"retriever {self.url}: {cause}")
        return [[scored.passage() for scored in row] for row in rows]


class RetrieverFleet:
    """Several servers of the same index as one: a search goes to the server with the fewest open
    searches, and on to the next when that one fails. clock: monotonic seconds."""

    def __init__(self, servers: Sequence[Backend], clock: Callable[[], float] = time.monotonic):
        self.servers, self.clock = servers, clock
        self._open = [0] * len(servers)
        self._rests_until = [-float("inf")] * len(servers)

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return the passages of each query, best first. Raises the last InfrastructureFault once
        every server has failed."""
        left = set(range(len(self.servers)))
        while True:
            now = self.clock()
            order = {place: (self._rests_until[place] > now, self._open[place]) for place in left}
            left.remove(chosen := min(left, key=lambda place: (order[place], place)))
            self._open[chosen] += 1
            try:
                return await self.servers[chosen].search(queries, topk)
            except InfrastructureFault:
                self._rests_until[chosen] = self.clock() + _RESTS_S
                if not left:
                    raise
            finally:
                self._open[chosen] -= 1
