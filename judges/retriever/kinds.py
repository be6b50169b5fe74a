"""Kinds of FAISS index (the table in docs/retrieval.md): how one is made for a corpus, filled in
bounded memory, and loaded.

Any other name is taken for a factory string, such as SLATE's "IVF65536_HNSW32,PQ128". "np" stands
for no polysemous training, which takes most of the time and serves searches of another kind.
Source: FAISS's wiki ("Guidelines to choose an index").
"""

import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import faiss
import numpy as np

BLOCK = 16384
"""Vectors that are added at once: some tens of MiB, and enough for all threads of FAISS."""
_TRAINED_ON = 64
"""Vectors sampled for each centroid of a training. FAISS warns below 39."""
_SEARCH = {"ivfpq": "nprobe=64", "refined": "nprobe=64,k_factor_rf=4", "hnsw": "efSearch=128"}
_EXPECTED = 'expected flat, ivfpq, refined, hnsw or a factory string, such as "IVF4096,PQ64"'


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
        return faiss.index_factory(dimensions, text, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        kind = f"{text!r} of {dimensions} dimensions"
        raise ValueError(f"FAISS has no index {kind} ({_why(error)}): {_EXPECTED}") from None


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
    if ivf and _gpus():
        ivf.clustering_index = on_gpus(faiss.IndexFlatIP(ivf.d))
    try:
        index.train(vectors[rows])  # pyright: ignore[reportCallIssue]
    except RuntimeError as error:
        fault = f"an index of this kind cannot be trained on {sample} vectors ({_why(error)})"
        raise ValueError(f"{fault}: kind flat or hnsw needs no training") from None


def load(file: Path, text: str, search: str) -> faiss.Index:
    """Return a written index, on the GPUs if FAISS finds any. search: FAISS's search parameters.
    The vectors of a flat or HNSW index are mapped, so processes share their pages. Raises
    ValueError for a damaged file and for a parameter that this kind does not have."""
    # FAISS can map inverted lists too, but then starts 32 threads in each search (3.5 ms instead of
    # 0.02 for 5,000 vectors)
    try:
        index = faiss.read_index(str(file), 0 if "IVF" in text else faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        remedy = "build the index anew with coppice index"
        raise ValueError(f"{file} is damaged ({_why(error)}): {remedy}") from None
    tune(index, search, text)
    return on_gpus(index)


def tune(index: faiss.Index, search: str, text: str) -> None:
    """Set the search parameters of an index. Raises ValueError for one that its kind does not have,
    and for one that is not above 0."""
    expected = f"expected parameters of {text}, such as nprobe=64 (IVF) or efSearch=128 (HNSW)"
    if search and not re.fullmatch(r"\w+=0*[1-9]\d*(,\w+=0*[1-9]\d*)*", search):
        raise ValueError(f"{search!r}: {expected}")
    try:
        faiss.ParameterSpace().set_index_parameters(index, search)
    except RuntimeError as error:
        raise ValueError(f"{search!r} ({_why(error)}): {expected}") from None


def on_gpus(index: faiss.Index) -> faiss.Index:
    """Return the index on all GPUs, divided among them, or the index itself where FAISS finds none
    or has no GPU version of its kind."""
    if not _gpus():
        return index
    options = faiss.GpuMultipleClonerOptions()  # pyright: ignore[reportCallIssue]
    options.shard = options.allowCpuCoarseQuantizer = True
    try:
        return faiss.index_cpu_to_all_gpus(index, options)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        print(f"the index stays on the CPU: {_why(error)}", file=sys.stderr)
        return index


def _gpus() -> int:
    return faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0


def _why(error: RuntimeError) -> str:
    """Return FAISS's reason without the place in its source."""
    return re.sub(r"^.*(\.\w+:\d+: | failed: )", "", str(error).strip(), flags=re.DOTALL)
