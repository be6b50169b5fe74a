"""Approximate indexes find what the exact one finds, up to a stated share; what cannot be built or
loaded is refused with the remedy."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import msgspec
import numpy as np
import pytest

from coppice.judges.retriever import index as indexes
from coppice.judges.retriever.encoder import Encoder, Role
from coppice.judges.retriever.index import Index, build, read_manifest
from coppice.research.benches.retrieval_scale import Clusters
from coppice.tools.defaults.index_corpus import main

PASSAGES, DIMENSIONS = 2000, 32


class Numbers(Encoder):
    """An encoder of texts that are numbers: the vector of passage i, and near it the query i."""

    dimensions = DIMENSIONS  # pyright: ignore

    def __init__(self) -> None:
        self.name = "numbers"
        clusters = Clusters(DIMENSIONS, 40)
        self.vectors, self.embedded = np.concatenate(list(clusters.blocks(PASSAGES))), 0

    def embed(self, texts: list[str], role: Role) -> np.ndarray:
        self.embedded += len(texts)
        return self.vectors[[int(text.rpartition(" ")[2]) for text in texts]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """FAISS's threads wait for each other by spinning, which takes minutes beside other tests."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


@pytest.fixture(scope="module")
def encoder() -> Numbers:
    return Numbers()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"id": i, "contents": f'"T"\n{i}'} for i in range(PASSAGES)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def flat(corpus: Path, encoder: Numbers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat") / "index"
    build(corpus, folder, encoder)
    return folder


def found(folder: Path, encoder: Numbers, search: str = "") -> list[list[str]]:
    queries = [f"T. {i}" for i in range(0, PASSAGES, 40)]
    return [[p.id for p in row] for row in Index(folder, encoder, search).search(queries, 10)]


@pytest.mark.parametrize(
    ("kind", "made", "least"),
    [
        ("ivfpq", "IVF128,PQ4np", 0.5),
        ("refined", "IVF128,PQ4np,Refine(SQ8)", 0.9),
        ("hnsw", "HNSW32", 0.98),
        ("IVF64,Flat", "IVF64,Flat", 0.3),
        ("PCA16,IVF32,SQ8", "PCA16,IVF32,SQ8", 0.2),
    ],
)
def test_a_kind_finds_what_the_exact_search_finds_and_needs_no_second_embedding(
    kind: str, made: str, least: float, corpus: Path, flat: Path, encoder: Numbers, tmp_path: Path
) -> None:
    exact, embedded = found(flat, encoder), encoder.embedded
    manifest = build(corpus, tmp_path / "i", encoder, kind=kind, vectors=flat)
    assert encoder.embedded == embedded
    assert (manifest.kind, manifest.passages) == (made, PASSAGES)
    assert read_manifest(tmp_path / "i") == manifest
    assert not (tmp_path / "i" / "vectors.npy").exists()
    pairs = zip(found(tmp_path / "i", encoder), exact, strict=True)
    shares = [len(set(a) & set(b)) / 10 for a, b in pairs]
    assert least <= np.mean(shares) <= 1


def test_vectors_that_wait_on_the_disk_give_the_same_index_as_stored_ones(
    corpus: Path, flat: Path, encoder: Numbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(corpus, tmp_path / "stored", encoder, kind="ivfpq", vectors=flat)
    monkeypatch.setattr(indexes, "BLOCK", 900)
    build(corpus, tmp_path / "anew", encoder, kind="ivfpq")
    assert found(tmp_path / "anew", encoder) == found(tmp_path / "stored", encoder)
    assert {p.name for p in (tmp_path / "anew").iterdir()} == {p.name for p in flat.iterdir()}


def test_more_lists_find_more_and_few_lists_may_hold_fewer_than_topk(
    corpus: Path, flat: Path, encoder: Numbers, tmp_path: Path
) -> None:
    build(corpus, tmp_path / "i", encoder, kind="IVF512,Flat", search="nprobe=2", vectors=flat)
    few, every = found(tmp_path / "i", encoder), found(tmp_path / "i", encoder, "nprobe=512")
    assert min(map(len, few)) < 10, "a missing row is left out and is no passage"
    assert [set(row) for row in every] == [set(row) for row in found(flat, encoder)]


@pytest.mark.parametrize(
    ("passages", "dimensions", "text"),
    [
        (21_000_000, 768, "IVF16384,PQ96np"),
        (2_000_000, 384, "IVF4096,PQ48np"),
        (3890, 384, "IVF128,PQ48np"),
        (9, 20, "IVF8,PQ2np"),
    ],
)
def test_the_lists_of_ivfpq_grow_with_the_root(passages: int, dimensions: int, text: str) -> None:
    assert indexes.factory("ivfpq", passages, dimensions) == (text, "nprobe=64")


@pytest.mark.parametrize(
    ("kind", "search", "message"),
    [
        ("ivpq", "", "FAISS has no index 'ivpq' of 32 dimensions .*: expected flat, ivfpq"),
        ("IVF64,PQ5", "", "no index 'IVF64,PQ5' of 32 dimensions"),
        ("HNSW32_PQ4", "", "no index of inner products 'HNSW32_PQ4': expected flat, ivfpq"),
        ("IDMap,Flat", "", "no index of inner products 'IDMap,Flat'"),
        ("IVF8192,Flat", "", "cannot be trained on 2000 vectors .*8192.*: kind flat or hnsw"),
        ("flat", "nprobe=8", "'nprobe=8' .*nprobe.*: expected search parameters of Flat"),
        ("ivfpq", "nprobe=0", "'nprobe=0': expected search parameters of IVF128,PQ4np"),
        ("ivfpq", "nprobe", "'nprobe': expected search parameters"),
    ],
)
def test_what_faiss_cannot_build_is_refused_and_leaves_nothing(
    kind: str, search: str, message: str, corpus: Path, flat: Path, encoder: Numbers, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build(corpus, tmp_path / "i", encoder, kind=kind, search=search, vectors=flat)
    assert list(tmp_path.iterdir()) == []


def test_vectors_of_another_corpus_or_kind_are_refused(
    corpus: Path, flat: Path, encoder: Numbers, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text().replace('\\n39"', '\\n40"', 1))
    with pytest.raises(ValueError, match=r"--vectors .*expected the flat index of this corpus"):
        build(other, tmp_path / "i", encoder, kind="hnsw", vectors=flat)
    shutil.copytree(flat, tmp_path / "cut")
    whole = (flat / "index.faiss").read_bytes()
    (tmp_path / "cut" / "index.faiss").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"index.faiss is cut \(25 bytes"):
        build(corpus, tmp_path / "i", encoder, kind="hnsw", vectors=tmp_path / "cut")
    build(corpus, tmp_path / "h", encoder, kind="hnsw", vectors=flat)
    with pytest.raises(ValueError, match=r"kind='HNSW32'.* expected the flat index"):
        build(corpus, tmp_path / "i", encoder, vectors=tmp_path / "h")


@pytest.mark.parametrize("kind", ["flat", "ivfpq", "hnsw"])
def test_a_truncated_index_is_refused_with_the_remedy(
    kind: str, corpus: Path, flat: Path, encoder: Numbers, tmp_path: Path
) -> None:
    build(corpus, tmp_path / "i", encoder, kind=kind, vectors=flat)
    file = tmp_path / "i" / "index.faiss"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"index\.faiss is damaged .*build the index anew"):
        Index(tmp_path / "i", encoder)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"passages": 7}, r"has \(2000, 2000, 32\) vectors.*expected \(7, 7, 32\).*anew"),
        ({"encoder": "e5", "dimensions": 768}, r"e5 \(768 .*not numbers \(32\).*coppice index"),
    ],
)
def test_an_index_of_another_size_or_encoder_is_refused(
    corpus: Path, encoder: Numbers, tmp_path: Path, other: Any, told: str
) -> None:
    build(corpus, tmp_path / "i", encoder)
    manifest = msgspec.structs.replace(read_manifest(tmp_path / "i"), **other)
    (tmp_path / "i" / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(ValueError, match=told):
        Index(tmp_path / "i", encoder)


def test_the_command_builds_the_kind_it_is_given_and_refuses_in_one_line(
    corpus: Path, flat: Path, tmp_path: Path, encoder: Numbers, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("coppice.tools.defaults.index_corpus.Encoder", lambda *_: encoder)
    command = [str(corpus), "--out", str(tmp_path / "i"), "--vectors", str(flat), "--kind"]
    main([*command, "hnsw", "--search", "efSearch=99"])
    made = read_manifest(tmp_path / "i")
    assert (made.kind, made.search) == ("HNSW32", "efSearch=99")
    assert (main([*command, "nonsense"]), capsys.readouterr().err.count("\n")) == (2, 1)
