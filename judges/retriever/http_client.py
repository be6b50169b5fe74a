"""Client of the Search-R1 retrieval protocol: POST /retrieve {"queries", "topk", "return_scores"} (methods.md 1.8)."""

from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from judges.retriever.passage_text import title_and_text
from wire.faults import InfrastructureFault
from wire.messages import Passage


class _Document(msgspec.Struct):
    contents: str
    id: str | int = ""


class _Scored(msgspec.Struct):
    document: _Document
    score: float


class _Reply(msgspec.Struct):
    result: list[list[_Scored]]


class SearchR1Client:
    """Asks one server; use it as an async context manager."""

    def __init__(self, url: str, timeout_s: float = 60.0):
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> "SearchR1Client":
        self._session = aiohttp.ClientSession(timeout=self.timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Passages of each query, best first. Raises InfrastructureFault naming the server and the cause."""
        body: dict[str, Any] = {"queries": queries, "topk": topk, "return_scores": True}
        try:
            async with self._session.post(self.url, json=body) as response:
                text = await response.read()
                if response.status != 200:
                    raise InfrastructureFault(f"retriever {self.url}: HTTP {response.status}: {text[:200]!r}")
                rows = msgspec.json.decode(text, type=_Reply).result
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
            raise InfrastructureFault(f"retriever {self.url}: {type(error).__name__}: {error}") from None
        if len(rows) != len(queries):
            raise InfrastructureFault(f"retriever {self.url}: {len(rows)} results for {len(queries)} queries")
        return [
            [Passage(str(s.document.id), *title_and_text(s.document.contents), s.score) for s in row] for row in rows
        ]
