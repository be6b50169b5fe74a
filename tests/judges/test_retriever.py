"""What is found is what inner products say, whichever way it is asked for; what cannot be used is
refused with its reason."""

import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from coppice.judges.retriever import http_server
from coppice.judges.retriever.encoder import Encoder, model_folder
from coppice.judges.retriever.hot import HotQueries
from coppice.judges.retriever.http_client import SearchR1Client, title_and_text
from coppice.judges.retriever.http_server import application
from coppice.judges.retriever.index import Index, build, read_corpus, read_manifest
from coppice.tools.defaults.index_corpus import ensure_index
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Passage, RetrieveRequest
from tests.judges.test_llm import chat_server, serving

FACTS = {
    "Bulgaria": "Currency: lev",
    "Italy": "Capital: Rome",
    "Côte d'Ivoire": "Main export: cocoa",
    "Chile": "Highest mountain: Ojos del Salado",
}
MOUNTAIN, EXPORT = "What is the highest mountain of Chile?", "Which country exports cocoa?"


@pytest.fixture(scope="module")
def minilm() -> Encoder:
    return Encoder("minilm")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [Passage(str(i), *fact, 0.0).listed(False) for i, fact in enumerate(FACTS.items())]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(corpus: Path, minilm: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("index") / "made"
    build(corpus, made, minilm)
    return made


def test_an_embedding_is_the_unit_mean_whatever_it_is_padded_with(minilm: Encoder) -> None:
    longer = "a much longer text about the mountains of Chile and their snow"
    alone, beside = minilm.embed(["lev"], "query"), minilm.embed(["lev", longer], "query")
    assert alone.shape == (1, minilm.dimensions)
    assert alone.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(beside, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(alone[0], beside[0], atol=1e-5)


def test_passages_are_cut_at_180_tokens_and_queries_at_256(minilm: Encoder) -> None:
    words = ["lev"] * 178  # and the two special tokens
    texts = [" ".join(words), " ".join([*words, "mountain"])]
    cut, whole = minilm.embed(texts, "passage"), minilm.embed(texts, "query")
    np.testing.assert_allclose(cut[0], cut[1], atol=1e-5)
    assert np.abs(whole[0] - whole[1]).max() > 1e-4


@pytest.mark.parametrize(
    ("place", "prefixed"),
    [
        ("e5-tiny", True),
        ("models--x--e5-base-v2/snapshots/0a1", True),
        ("models--x--bge/snapshots/1e5c0", False),
    ],
)
def test_e5_encoders_prefix_and_no_others(
    minilm: Encoder, tmp_path: Path, place: str, prefixed: bool
) -> None:
    link = tmp_path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(model_folder("minilm"))
    encoder = Encoder(str(link))
    for role in ("query", "passage"):
        plain = minilm.embed([f"{role}: x" if prefixed else "x"], role)
        np.testing.assert_allclose(encoder.embed(["x"], role), plain, atol=1e-5)


@pytest.mark.parametrize("title", ['"Heroes"', '"Weird Al" Yankovic', 'He said "no"', "Chile"])
def test_a_title_keeps_its_own_quotation_marks(title: str) -> None:
    assert title_and_text(Passage("1", title, "text", 0.0).listed(False)["contents"]) == (
        title,
        "text",
    )


def test_search_ranks_by_inner_product_down_to_the_whole_corpus(
    folder: Path, minilm: Encoder
) -> None:
    found = Index(folder, minilm).search([MOUNTAIN, EXPORT], topk=3)
    assert [row[0].title for row in found] == ["Chile", "Côte d'Ivoire"]
    assert found[1][0] == Passage("2", "Côte d'Ivoire", "Main export: cocoa", found[1][0].score)
    passages = minilm.embed([f"{title}. {text}" for title, text in FACTS.items()], "passage")
    products = minilm.embed([MOUNTAIN, EXPORT], "query") @ passages.T
    best, scores = -np.sort(-products, axis=1)[:, :3], [[p.score for p in row] for row in found]
    np.testing.assert_allclose(scores, best, atol=1e-5)
    (row,) = Index(folder, minilm).search([MOUNTAIN], topk=99)
    assert sorted(p.id for p in row) == ["0", "1", "2", "3"]


GOOD = b'{"id": "a", "contents": "\\"T\\"\\ntext"}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops", "malformed"),
        (b'{"id": "b"}', "contents"),
        (b'{"contents": "\\"T\\"\\ntext"}', "id"),
        (b'{"id": "b", "contents": "only a title"}', "empty text"),
        (GOOD, "'a' was used before"),
        (b'{"id": "b", "contents": "T\\n' + b"a" * 2**17 + b'"}', "more than 131072: split it"),
        (b'{"id": "b", "contents": "\xff"}', "utf-8"),
        (b'{"id": "b", "more": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([GOOD, line, GOOD.replace(b'"a"', b'"c"')]))
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:2: .*(?i:{reason})"):
        read_corpus(path)
    offsets, bad = read_corpus(path, skip_bad=True)
    assert list(offsets) == [0, len(GOOD) + len(line) + 2]
    assert len(bad) == 1


def test_empty_lines_of_a_corpus_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", GOOD.replace(b'"a"', b'"c"'), b" \r", b""]))
    offsets, bad = read_corpus(path)
    assert (list(offsets), bad) == ([0, len(GOOD) + 2], [])


def test_a_corpus_is_refused_with_the_number_of_its_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([GOOD, GOOD, b"{oops", GOOD.replace(b'"a"', b'"c"')]))
    told = r"^2 of 4 lines .*corpus\.jsonl:2: id 'a' was used before .*--skip-bad"
    with pytest.raises(ValueError, match=told):
        read_corpus(path)
    for body, told in (
        (b"", "it is empty"),
        (b"{oops", r"corpus\.jsonl:1: "),
        (GOOD.decode().encode("utf-16"), r"UTF-16.*iconv"),
    ):
        path.write_bytes(body)
        with pytest.raises(ValueError, match=told):
            read_corpus(path, skip_bad=True)


def test_the_byte_order_mark_of_a_corpus_is_no_part_of_its_first_passage(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD.replace(b'"a"', b'"c"'))
    offsets, bad = read_corpus(path)
    assert (list(offsets), bad) == ([3, 3 + len(GOOD) + 1], [])


def test_without_a_sound_index_the_command_that_builds_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="coppice index CORPUS --out"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"damaged.*coppice index"):
        read_manifest(tmp_path)


def test_another_folder_is_never_replaced(corpus: Path, minilm: Encoder, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds no index"):
        build(corpus, tmp_path, minilm)
    assert (tmp_path / "thesis.txt").exists()


def test_an_index_is_built_once_for_a_corpus(
    corpus: Path, tmp_path: Path, minilm: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.tools.defaults.index_corpus.Encoder", lambda *_: minilm)
    made = ensure_index(corpus, "minilm", tmp_path, threads=1)
    written = (made / "index.faiss").stat().st_mtime_ns
    assert ensure_index(corpus, "minilm", tmp_path, threads=1) == made
    assert (made / "index.faiss").stat().st_mtime_ns == written
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(corpus.read_bytes().replace(b"lev", b"Lev"))
    assert ensure_index(changed, "minilm", tmp_path, threads=1) != made


class Shelf:
    """A backend whose passages repeat the query; it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        self.asked.append(queries)

        def passage(query: str, i: int) -> Passage:
            return Passage(str(i), f"title of {query}", f"text {i}", 1.0 - i / 10)

        return [[passage(query, i) for i in range(topk)] for query in queries]


@pytest.mark.parametrize("suffix", ["", "/", "/retrieve"])
async def test_the_client_gets_from_the_server_what_the_backend_found(suffix: str) -> None:
    async with serving(application(Shelf())) as url, SearchR1Client(url + suffix) as client:
        assert await client.search(["x", "y"], 2) == await Shelf().search(["x", "y"], 2)


async def post(url: str, body: bytes) -> tuple[int, Any]:
    async with aiohttp.request("POST", url + "/retrieve", data=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"query": "x"}', "query"),  # what SLATE's released loop sends
        (b'{"queries": "x"}', "queries"),
        (b'{"queries": ["x"], "topk": 0}', "topk"),
        (b'{"queries": ["x"], "topk": 1001}', "topk of 1 to 1000"),
        (b'{"queries": []}', "at least one query"),
        (b"{", "truncated"),
    ],
)
async def test_a_bad_request_is_answered_422_with_the_reason(body: bytes, reason: str) -> None:
    shelf = Shelf()
    async with serving(application(shelf)) as url:
        status, answer = await post(url, body)
    assert status == 422
    assert reason in answer["detail"]
    assert shelf.asked == []


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"out of memory", 500, "HTTP 500.*out of memory"),
        (b'{"results": []}', 200, "ValidationError"),
        (b'{"result": ' + b"[" * 100_000, 200, "ValidationError|RecursionError"),
        (b'{"result": []}', 200, "0 results for 1 queries"),
    ],
)
async def test_another_protocol_is_a_fault_of_the_server(
    body: bytes, status: int, message: str
) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    server = chat_server(reply, "POST /retrieve")
    async with server as url, SearchR1Client(url, attempts=1) as client:
        with pytest.raises(InfrastructureFault, match=f"{url}/retrieve.*{message}"):
            await client.search(["x"], 1)


async def test_the_query_used_longest_ago_leaves_the_cache_first() -> None:
    shelf = Shelf()
    retriever = HotQueries(shelf, 2)
    for query in ("x", "y", "x", "z", "x"):
        await retriever.search([query], 1)
    assert shelf.asked == [["x"], ["y"], ["z"]]
    for topk in (0, 1001):
        with pytest.raises(DataFault, match=f"topk {topk}: expected 1 to 1000"):
            await retriever.handle(RetrieveRequest(["x"], topk), None)  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "said"),
    [("--threads 0", "Expected `int` >= 1 - at `$.threads`"), ("", "/nowhere holds no index")],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    options: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["http_server", "--index", "/nowhere", *options.split()])
    with pytest.raises(SystemExit):
        http_server.main()
    assert said in capsys.readouterr().err.splitlines()[-1]
