"""Kinds of index against the exact one (recall, memory, build time, queries per second), and what
joining and caching save a retriever.

The vectors are synthetic: drawn around centres, with a variance that falls off from axis to axis,
and rotated. They say how a kind grows with a corpus, not how well it finds the passages of a real
one. Times are CPU seconds of one thread.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import faiss
import msgspec
import numpy as np

from coppice.common import loop
from coppice.common.numbers import Count, Positive
from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever import index as indexes
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.hot import HotQueries
from coppice.judges.retriever.index import build
from coppice.judges.retriever.worker import opened
from coppice.research.benches import result
from coppice.tools.defaults.facts import ensure_facts
from coppice.tools.defaults.settings import cache_folder

K, CALLERS, DIMENSIONS = 10, 64, 384
BATCHES = (1, 32)  # of queries that are searched together
# a vector's distance from its centre, whose length is 1: vectors around one centre have a cosine of
# about 0.67
NOISE = 0.7
# queries kept, and joined into a search
BEFORE = {"nothing": (0, 1), "joined": (0, 32), "joined, cached": (65536, 32)}


class Clusters:
    """Unit vectors around ``count`` centres, float32; the same ones each time."""

    def __init__(self, dimensions: int, count: int):
        scale = (1 + np.arange(dimensions)) ** -0.5
        normal = np.random.default_rng(0).standard_normal((dimensions, dimensions))
        rotation = np.linalg.qr(normal).Q
        self.axes = (scale[:, None] / np.linalg.norm(scale) * rotation).astype(np.float32)
        self.centres = np.zeros((1, dimensions), np.float32)
        self.centres = self.draw(count, 1, 1.0)

    def draw(self, count: int, stream: int, noise: float = NOISE) -> np.ndarray:
        """Return vectors [count, dimensions]; another stream has others."""
        rng = np.random.default_rng([0, stream])
        vectors = noise * rng.standard_normal((count, len(self.axes)), np.float32) @ self.axes
        vectors += self.centres[rng.integers(len(self.centres), size=count)]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def blocks(self, count: int) -> Iterable[np.ndarray]:
        """Yield so many vectors in blocks."""
        places = range(0, count, indexes.BLOCK)
        return (self.draw(min(indexes.BLOCK, count - at), 2 + at) for at in places)


def rate(index: faiss.Index, queries: np.ndarray, batch: int, seconds: float) -> float:
    """Return queries per CPU second when ``batch`` of them are searched together."""
    start, done, spent = time.process_time(), 0, 0.0
    while spent < seconds:
        some = np.take(queries, range(done, done + batch), axis=0, mode="wrap")
        index.search(some, K)  # pyright: ignore[reportCallIssue]
        done, spent = done + batch, time.process_time() - start
    return done / spent


def compared(
    blocks: Callable[[], Iterable[np.ndarray]], count: int, queries: np.ndarray,
    names: tuple[str, ...], seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Build each kind and return what it takes and finds. names: kinds, and after a space search
    parameters; the first is exact."""
    rows, exact = dict[str, Any](), [set[int]()]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            kind, _, search = name.partition(" ")
            text, usual = indexes.factory(kind, count, queries.shape[1])
            file, row = Path(folder) / kind.replace("/", "_"), rows.setdefault(name, {"kind": text})
            if not file.exists():
                index, start = indexes.empty(text, queries.shape[1]), time.process_time()
                indexes.fill(index, blocks(), count, Path(folder) / "vectors")
                faiss.write_index(index, str(file))
                del index
                row["build_s"] = time.process_time() - start
            index = indexes.loaded(file, text, search or usual)
            parts = (index.search(part, K)[1].tolist() for part in np.array_split(queries, 10))
            found = [set(one) for part in parts for one in part]
            exact = exact if len(rows) > 1 else found
            hits = sum(len(a & b) for a, b in zip(found, exact, strict=True))
            row["recall"] = hits / (K * len(queries))
            row["bytes"] = file.stat().st_size / count
            row["queries_per_s"] = {str(n): rate(index, queries, n, seconds) for n in BATCHES}
            print(name, row, file=sys.stderr, flush=True)  # the next kind may take long
    return rows


async def called(folder: Path, questions: list[str], count: int) -> dict[str, Any]:
    """Ask a real index, 64 calls at once, some questions more often (Zipf). Returns CPU ms per call
    by what stands before the index."""
    shares, rows = 1 / (1 + np.arange(len(questions))), dict[str, Any]()
    queried = np.random.default_rng(0).choice(questions, count, p=shares / shares.sum()).tolist()
    async with opened(RetrieverConfig(str(folder), cache=0)) as local:
        for name, (size, batch) in BEFORE.items():
            hot, start = HotQueries(local.backend, size, batch), time.process_time()
            for first in range(0, count, CALLERS):
                some = queried[first : first + CALLERS]
                await asyncio.gather(*(hot.search([question], 3) for question in some))
            cpu_ms = 1000 * (time.process_time() - start) / count
            rows[name] = {"cpu_ms": cpu_ms, "searched": hot.searched}
    return rows


def run(
    passages: Count = 2_000, queries: Count = 200,
    names: tuple[str, ...] = ("flat", "ivfpq", "refined", "hnsw"), seconds: Positive = 0.1,
    texts: Count = 300, calls: Count = 500,
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark. texts: passages of the built-in corpus, whose index is compared too, and
    called. The ratio is the least recall of 10."""
    threads, facts = faiss.omp_get_max_threads(), ensure_facts(cache_folder())
    faiss.omp_set_num_threads(1)
    clusters = Clusters(DIMENSIONS, max(1, passages // 100))
    try:
        drawn = clusters.draw(queries, 0)
        rows = compared(lambda: clusters.blocks(passages), passages, drawn, names, seconds)
        with tempfile.TemporaryDirectory() as folder:
            corpus, index = Path(folder) / "corpus.jsonl", Path(folder) / "index"
            encoder = Encoder()
            lines = (facts / "corpus.jsonl").read_bytes().splitlines(keepends=True)
            corpus.write_bytes(b"".join(lines[:texts]))
            real = build(corpus, index, encoder).passages
            tasks = (facts / "train.jsonl").read_bytes().splitlines()
            queried = [msgspec.json.decode(row)["question"] for row in tasks]
            vectors = faiss.read_index(str(index / "index.faiss")).reconstruct_n(0, real)
            embedded = encoder.embed(queried[:queries], "query")
            found = compared(lambda: [vectors], real, embedded, names, seconds)
            served = loop.run(called(index, queried, calls))
    finally:
        faiss.omp_set_num_threads(threads)
    least = min(one["recall"] for one in rows.values())
    more = {"synthetic": rows, "built_in": found, "calls": served}
    return result("least recall@10 of the kinds of index", least, 0.5, "higher", **more)
