"""A corpus and its FAISS index in one folder: index.faiss, passages.jsonl (a copy of the corpus),
offsets.npy and manifest.json. The index ranks unit vectors by inner product.

docs/retrieval.md has the table of kinds. "np" in a factory string of FAISS stands for no polysemous
training, which takes most of the time and serves searches of another kind.
"""

import math
import re
import shutil
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import faiss
import msgspec
import numpy as np

from coppice.common import jsonl
from coppice.common.atomic import drafted
from coppice.common.numbers import LONGEST_TEXT
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.http_client import title_and_text
from coppice.wire import digest
from coppice.wire.messages import Passage


class IndexManifest(msgspec.Struct, frozen=True):
    """The encoder and the corpus of an index. An index of another encoder is refused. kind: FAISS's
    factory string. search: FAISS's search parameters, which a retriever may change."""

    encoder: str
    dimensions: int
    passages: int
    corpus_sha256: str
    kind: str = "Flat"
    search: str = ""


class _Row(msgspec.Struct):
    id: str | int
    contents: str


BLOCK = 16384
"""Vectors that are added at once: some tens of MiB, and enough for all threads of FAISS."""
_TRAINED_ON = 64
"""Vectors sampled for each centroid of a training. FAISS warns below 39."""
_SEARCH = {"ivfpq": "nprobe=64", "refined": "nprobe=64,k_factor_rf=4", "hnsw": "efSearch=128"}
_EXPECTED = 'expected flat, ivfpq, refined, hnsw or a factory string, such as "IVF4096,PQ64"'
_EMBEDDED = 64
"""Passages of one batch of the encoder."""
_HEADER = 45
"""Bytes that FAISS writes before the vectors of a flat index."""
_ANEW = "build the index anew with coppice index"
_TOLD_S = 5.0
"""Seconds between two lines of progress."""


def read_corpus(path: Path, skip_bad: bool = False) -> tuple[np.ndarray, list[str]]:
    """Return the byte offsets of the usable lines, int64 [lines], and a message for each skipped
    line. The texts stay on the disk. Raises ValueError for lines that cannot be used, which counts
    them and has the number and the reason of the first, unless ``skip_bad``, and FileNotFoundError.
    """
    if not path.is_file():
        wish = "expected a JSONL file of {id, contents}"
        raise FileNotFoundError(f"corpus {path} does not exist: {wish}")
    offsets, bad, seen = array("q"), list[str](), set[str | int]()
    try:
        start = jsonl.beginning(path)
    except ValueError as error:
        raise ValueError(f"corpus {error}") from None
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if not line.strip():
                start += len(line)
                continue
            try:
                row = msgspec.json.decode(line, type=_Row)
                if row.id in seen:
                    raise ValueError(f"id {row.id!r} was used before")
                if not title_and_text(row.contents)[1]:
                    raise ValueError("empty text")
                if (size := len(row.contents)) > LONGEST_TEXT:
                    raise ValueError(f"{size} characters, more than {LONGEST_TEXT}: split it")
                seen.add(row.id)
                offsets.append(start)
            except (*jsonl.MALFORMED, ValueError) as error:
                wish = "(expected {id, contents} with a title line and a text)"
                bad.append(f"{path}:{number}: {jsonl.fault(error)} {wish}")
            start += len(line)
    if not offsets:
        why = f"the first of its lines: {bad[0]}" if bad else "it is empty"
        raise ValueError(f"{path} holds no usable passage: {why}")
    if bad and not skip_bad:
        fault = f"{len(bad)} of {len(bad) + len(offsets)} lines cannot be used; the first: {bad[0]}"
        raise ValueError(f"{fault}. Mend them, or coppice index --skip-bad passes over them")
    return np.array(offsets), bad


def build(
    corpus: Path,
    folder: Path,
    encoder: Encoder,
    *,
    skip_bad: bool = False,
    kind: str = "flat",
    search: str = "",
    vectors: Path | None = None,
) -> IndexManifest:
    """Embed a corpus and write its index to ``folder``, in place of an earlier index.

    kind, search: see ``factory``. vectors: a flat index of the same corpus and
    encoder whose vectors are taken instead of embedding. Raises FileExistsError when ``folder``
    holds something else, and ValueError for a kind that FAISS cannot make or train."""
    is_index = (folder / "manifest.json").is_file()
    if folder.exists() and not is_index and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and holds no index: name a new or empty folder")
    offsets, bad = read_corpus(corpus, skip_bad)
    for reason in bad[:20]:
        print(f"skipped {reason}", file=sys.stderr)
    if bad:
        print(f"skipped {len(bad)} of {len(bad) + len(offsets)} lines", file=sys.stderr)
    text, usual = factory(kind, len(offsets), encoder.dimensions)
    size, proof = (encoder.dimensions, len(offsets)), digest.file(corpus, drop=False)
    manifest = IndexManifest(encoder.name, *size, proof, text, search or usual)
    index = empty(text, encoder.dimensions)
    tune(index, manifest.search, text)
    source = _stored(vectors, manifest) if vectors else _embedded(corpus, offsets, encoder)
    with drafted(folder, replace=True) as draft:
        fill(index, source, len(offsets), draft / "vectors.npy")
        faiss.write_index(index, str(draft / "index.faiss"))
        np.save(draft / "offsets.npy", offsets)
        shutil.copy(corpus, draft / "passages.jsonl")
        (draft / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return manifest


def _embedded(corpus: Path, offsets: np.ndarray, encoder: Encoder) -> Iterator[np.ndarray]:
    """Yield the vectors of a corpus, float32 [passages, dimensions] in blocks."""
    start = told = time.monotonic()
    ends = np.append(offsets[1:], corpus.stat().st_size)
    with corpus.open("rb") as file:
        for first in range(0, len(offsets), BLOCK):
            part = slice(first, first + BLOCK)
            # passages of similar length share a batch, which is padded to its longest
            order = np.argsort(ends[part] - offsets[part], kind="stable")
            block = np.empty((len(order), encoder.dimensions), np.float32)
            for at in range(0, len(order), _EMBEDDED):
                rows = order[at : at + _EMBEDDED]
                found = (_row(file, offset) for offset in offsets[part][rows])
                texts = [". ".join(title_and_text(row.contents)) for row in found]
                block[rows] = encoder.embed(texts, "passage")
                if time.monotonic() > told + _TOLD_S:
                    told, done = time.monotonic(), first + at + len(rows)
                    speed = f"{done / (told - start):.0f}/s"
                    print(f"  embedded {done} of {len(offsets)} passages ({speed})", flush=True)
            yield block


def _stored(folder: Path, wanted: IndexManifest) -> np.ndarray:
    """Return the vectors of a flat index, float32 [passages, dimensions], mapped. Raises ValueError
    unless it is of this corpus and encoder."""
    stored = read_manifest(folder)
    if stored != (expected := msgspec.structs.replace(wanted, kind="Flat", search="")):
        wish = f"expected the flat index of this corpus, {expected}"
        raise ValueError(f"--vectors {folder} is {stored}: {wish}")
    file, shape = folder / "index.faiss", (stored.passages, stored.dimensions)
    # FAISS writes them last
    before = file.stat().st_size - 4 * math.prod(shape)
    if before != _HEADER:
        raise ValueError(f"{file} is cut ({before} bytes before the vectors): {_ANEW}")
    return np.memmap(file, np.float32, "r", before, shape)


def read_manifest(folder: Path) -> IndexManifest:
    """Return the manifest of an index. Raises FileNotFoundError or ValueError with the remedy."""
    path = folder / "manifest.json"
    if not path.is_file():
        remedy = f"build one with coppice index CORPUS --out {folder}"
        raise FileNotFoundError(f"{folder} holds no index: {remedy}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=IndexManifest)
    except jsonl.MALFORMED as error:
        raise ValueError(f"{path} is damaged ({error}): {_ANEW}") from None


class Index:
    """A loaded index with its encoder. It is on the GPUs if FAISS finds any. search: FAISS's search
    parameters, "" for the index's own."""

    def __init__(self, folder: Path, encoder: Encoder, search: str = ""):
        self.manifest = manifest = read_manifest(folder)
        if (manifest.encoder, manifest.dimensions) != (encoder.name, encoder.dimensions):
            maker = f"{manifest.encoder} ({manifest.dimensions} dimensions)"
            other = f"{encoder.name} ({encoder.dimensions}): use that encoder, or {_ANEW}"
            raise ValueError(f"index {folder} was made by encoder {maker}, not {other}")
        self.encoder = encoder
        self.faiss = loaded(folder / "index.faiss", manifest.kind, search or manifest.search)
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        sizes = (self.faiss.ntotal, len(self.offsets), self.faiss.d)
        if sizes != (expected := (manifest.passages, manifest.passages, manifest.dimensions)):
            fault = f"has {sizes} vectors, passages and dimensions, expected {expected}"
            raise ValueError(f"index {folder} {fault}: {_ANEW}")
        self.corpus = (folder / "passages.jsonl").open("rb")

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return the ``topk`` nearest passages of each query, best first; fewer where the lists
        that are searched hold fewer."""
        vectors = self.encoder.embed(queries, "query")
        scores, rows = self.faiss.search(vectors, min(topk, len(self.offsets)))
        return [
            [self._passage(row, score) for score, row in zip(*found, strict=True) if row >= 0]
            for found in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def _passage(self, row: int, score: float) -> Passage:
        entry = _row(self.corpus, int(self.offsets[row]))
        return Passage(str(entry.id), *title_and_text(entry.contents), score)


def _row(corpus: BinaryIO, offset: int) -> _Row:
    """Return the passage whose line begins at a byte."""
    corpus.seek(offset)
    return msgspec.json.decode(corpus.readline(), type=_Row)


def factory(kind: str, vectors: int, dimensions: int) -> tuple[str, str]:
    """Return FAISS's factory string and the search parameters of a kind for so many vectors."""
    if kind in ("ivfpq", "refined"):
        code = max(part for part in range(1, max(1, dimensions // 8) + 1) if dimensions % part == 0)
        text = f"IVF{2 ** int(math.log2(4 * math.sqrt(vectors)))},PQ{code}np"
        return text + ",Refine(SQ8)" * (kind == "refined"), _SEARCH[kind]
    return {"flat": "Flat", "hnsw": "HNSW32"}.get(kind, kind), _SEARCH.get(kind, "")


def empty(text: str, dimensions: int) -> faiss.Index:
    """Return an empty index of inner products. Raises ValueError for what FAISS cannot make."""
    try:
        index = faiss.index_factory(dimensions, text, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        kind = f"{text!r} of {dimensions} dimensions"
        raise ValueError(f"FAISS has no index {kind} ({_why(error)}): {_EXPECTED}") from None
    # some factories measure distances whatever they are told, and a map of ids cannot be added to
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or isinstance(index, faiss.IndexIDMap):
        raise ValueError(f"FAISS has no index of inner products {text!r}: {_EXPECTED}")
    return index


def fill(index: faiss.Index, vectors: Iterable[np.ndarray], count: int, scratch: Path) -> None:
    """Train an index if its kind needs that, and add ``count`` vectors, float32 blocks of [vectors,
    dimensions], or one array. Blocks that a trained kind needs twice wait in the file ``scratch``,
    so that memory holds one block. Raises ValueError for too few vectors to train on."""
    if not index.is_trained:
        if not isinstance(vectors, np.ndarray):
            waiting = np.lib.format.open_memmap(scratch, "w+", np.float32, (count, index.d))
            filled = 0
            for block in vectors:
                waiting[filled : filled + len(block)] = block
                filled += len(block)
            vectors = waiting
        _train(index, vectors)
    if isinstance(vectors, np.ndarray):
        vectors = np.array_split(vectors, math.ceil(count / BLOCK))
    for block in vectors:
        index.add(block)  # pyright: ignore[reportCallIssue]
    scratch.unlink(missing_ok=True)


def _train(index: faiss.Index, vectors: np.ndarray) -> None:
    """Train on a random sample, always the same one. Its memory does not grow with the vectors but
    with the lists."""
    ivf = faiss.try_extract_index_ivf(index)
    sample = min(len(vectors), _TRAINED_ON * max(1024, ivf.nlist if ivf else 0))
    rows = np.sort(np.random.default_rng(0).choice(len(vectors), sample, replace=False))
    if ivf and faiss.get_num_gpus():
        ivf.clustering_index = on_gpus(faiss.IndexFlatIP(ivf.d))
    try:
        index.train(vectors[rows])  # pyright: ignore[reportCallIssue]
    except RuntimeError as error:
        fault = f"an index of this kind cannot be trained on {sample} vectors ({_why(error)})"
        raise ValueError(f"{fault}: kind flat or hnsw needs no training") from None


def loaded(file: Path, text: str, search: str) -> faiss.Index:
    """Return a written index, on the GPUs if FAISS finds any. search: FAISS's search parameters.
    The vectors of a flat or HNSW index are mapped, so processes share their pages. Raises
    ValueError for a damaged file and for a parameter that this kind does not have."""
    # FAISS can map inverted lists too, but then starts 32 threads in each search (3.5 ms instead of
    # 0.02 for 5,000 vectors)
    try:
        index = faiss.read_index(str(file), 0 if "IVF" in text else faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ValueError(f"{file} is damaged ({_why(error)}): {_ANEW}") from None
    tune(index, search, text)
    return on_gpus(index)


def tune(index: faiss.Index, search: str, text: str) -> None:
    """Set the search parameters of an index. Raises ValueError for one that its kind does not have,
    and for one that is not above 0."""
    expected = f"expected search parameters of {text}, such as nprobe=64 or efSearch=128"
    if search and not re.fullmatch(r"\w+=0*[1-9]\d*(,\w+=0*[1-9]\d*)*", search):
        raise ValueError(f"{search!r}: {expected}")
    try:
        faiss.ParameterSpace().set_index_parameters(index, search)
    except RuntimeError as error:
        raise ValueError(f"{search!r} ({_why(error)}): {expected}") from None


def on_gpus(index: faiss.Index) -> faiss.Index:
    """Return the index on all GPUs, divided among them, or the index itself where FAISS finds none
    or has no GPU version of its kind."""
    if not faiss.get_num_gpus():
        return index
    options = faiss.GpuMultipleClonerOptions()  # pyright: ignore[reportCallIssue]
    options.shard = options.allowCpuCoarseQuantizer = True
    try:
        return faiss.index_cpu_to_all_gpus(index, options)  # pyright: ignore
    except RuntimeError as error:
        print(f"the index stays on the CPU: {_why(error)}", file=sys.stderr)
        return index


def _why(error: RuntimeError) -> str:
    """Return FAISS's reason without the place in its source."""
    return re.sub(r"^.*(\.\w+:\d+: | failed: )", "", str(error).strip(), flags=re.DOTALL)
