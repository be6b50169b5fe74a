"""The retriever over a real embedding model, as worker and over the Search-R1 protocol."""

import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from judges.retriever.encoder import Encoder
from judges.retriever.http_client import SearchR1Client
from judges.retriever.http_server import application
from judges.retriever.index import build
from judges.retriever.worker import LocalBackend, Retriever
from tests.services import bench
from wire.faults import DataFault, InfrastructureFault
from wire.messages import RetrieveRequest, RetrieveResult

FACTS = [
    ("Bulgaria", "Capital: Sofia"),
    ("Italy", "Capital: Rome"),
    ("Chile", "Currency: Chilean peso"),
    ("Mars", "Kind: planet"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("retriever")
    rows = [{"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(FACTS)]
    (made / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    build(made / "corpus.jsonl", made / "index", Encoder(), progress=False)
    return made / "index"


def test_embeddings_are_unit_vectors_and_do_not_depend_on_their_batch() -> None:
    encoder = Encoder()
    together = encoder.embed(["short", "a much longer sentence about the capital of Bulgaria"], "query")
    alone = encoder.embed(["short"], "query")
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(together[0], alone[0], atol=1e-5)


async def test_the_worker_finds_the_passage_and_asks_equal_queries_once(folder: Path, tmp_path: Path) -> None:
    retriever = Retriever(LocalBackend(folder, "minilm", 1), cache=2)
    async with bench(tmp_path) as b:
        await b.work("retriever", {"retrieve": retriever.handle})
        for _ in range(2):
            queries = ["capital of Bulgaria", "money in Chile", "capital of Bulgaria"]
            result: RetrieveResult = await b.dispatcher.call("retrieve", RetrieveRequest(queries, 2), deadline=30)
            titles = [row[0].title for row in result.passages]
            assert titles == ["Bulgaria", "Chile", "Bulgaria"]
            assert all(len(row) == 2 and row[0].score >= row[1].score for row in result.passages)
        assert retriever.counts["searched"] == 2
        with pytest.raises(DataFault, match="topk"):
            await b.dispatcher.call("retrieve", RetrieveRequest(["q"], 0), deadline=30)


async def test_the_search_r1_protocol_both_ways(folder: Path) -> None:
    runner = web.AppRunner(application(LocalBackend(folder, "minilm", 1)))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with SearchR1Client(url) as client:
        ((first, *_), (other, *_)) = await client.search(["capital of Italy", "a planet"], 2)
        assert (first.title, first.text, other.title) == ("Italy", "Capital: Rome", "Mars")
    async with aiohttp.ClientSession() as session:
        plain = {"queries": ["capital of Italy"], "topk": 1, "return_scores": False}
        async with session.post(f"{url}/retrieve", json=plain) as response:
            assert (await response.json())["result"] == [[{"id": "1", "contents": '"Italy"\nCapital: Rome'}]]
        for wrong in ({"query": "x"}, {"queries": [], "topk": 1}, {"queries": ["x"], "topk": 0}):
            async with session.post(f"{url}/retrieve", json=wrong) as response:
                assert response.status == 422
                assert (await response.json())["detail"]
    await runner.cleanup()
    async with SearchR1Client(url, timeout_s=2) as client:
        with pytest.raises(InfrastructureFault, match=r"127\.0\.0\.1"):
            await client.search(["x"], 1)
