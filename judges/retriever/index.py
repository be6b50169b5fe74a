"""A corpus and its FAISS index in one folder. The index is a flat inner product over unit vectors. Passages are read from disk by offset.

The folder has index.faiss, passages.jsonl (a copy of the corpus), offsets.npy and manifest.json.
"""

import hashlib
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import faiss
import msgspec
import numpy as np

from judges.retriever.encoder import Encoder
from judges.retriever.passage_text import title_and_text
from wire import jsonl
from wire.atomic import drafted
from wire.messages import Passage


class Manifest(msgspec.Struct, frozen=True):
    """The encoder and the corpus of an index. An index of another encoder is refused."""

    encoder: str
    dimensions: int
    passages: int
    corpus_sha256: str


class _Row(msgspec.Struct):
    id: str | int
    contents: str


class BadCorpus(ValueError):
    """A line of a corpus cannot be used. The message has its number and the reason."""


def read_corpus(path: Path, skip_bad: bool = False) -> tuple[list[int], list[str], list[str]]:
    """Return byte offsets and contents of the usable lines, and a message for each skipped line.

    Raises BadCorpus that counts the bad lines and names the first, unless ``skip_bad``, and FileNotFoundError when the file does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(f"corpus {path} does not exist: expected a JSONL file of {{id, contents}}")
    offsets, contents, bad, seen = [], [], [], set()
    try:
        start = jsonl.beginning(path)
    except ValueError as error:
        raise BadCorpus(f"corpus {error}") from None
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            try:
                row = msgspec.json.decode(line, type=_Row)
                if not title_and_text(row.contents)[1] or row.id in seen:
                    raise ValueError("empty text" if row.id not in seen else f"id {row.id!r} was used before")
                seen.add(row.id)
                offsets.append(start)
                contents.append(row.contents)
            except (*jsonl.MALFORMED, ValueError) as error:
                bad.append(
                    f"{path}:{number}: {jsonl.fault(error)} (expected {{id, contents}} with a title line and a text)"
                )
            start += len(line)
    if not contents:
        raise BadCorpus(
            f"{path} holds no usable passage: " + (f"the first of its lines: {bad[0]}" if bad else "it is empty")
        )
    if bad and not skip_bad:
        raise BadCorpus(
            f"{len(bad)} of {len(bad) + len(contents)} lines cannot be used; the first: {bad[0]}. Mend them, or tools/index --skip-bad"
            " passes over them"
        )
    return offsets, contents, bad


def build(
    corpus: Path, folder: Path, encoder: Encoder, batch: int = 64, skip_bad: bool = False, progress: bool = True
) -> Manifest:
    """Embed a corpus and write its index to ``folder``. A complete draft is renamed to ``folder`` and replaces an earlier index.

    Raises FileExistsError when ``folder`` holds something that is not an index.
    """
    if folder.exists() and not (folder / "manifest.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and holds no index: name a new or empty folder")
    offsets, contents, bad = read_corpus(corpus, skip_bad)
    for reason in bad[:20]:
        print(f"skipped {reason}", file=sys.stderr)
    if bad:
        print(f"skipped {len(bad)} of {len(bad) + len(contents)} lines", file=sys.stderr)
    index = faiss.IndexFlatIP(encoder.dimensions)
    start = time.monotonic()
    for first in range(0, len(contents), batch):
        texts = [". ".join(title_and_text(c)) for c in contents[first : first + batch]]
        index.add(encoder.embed(texts, "passage"))  # pyright: ignore[reportCallIssue]
        if progress and (first // batch) % 10 == 0:
            rate = (first + batch) / max(1e-9, time.monotonic() - start)
            print(
                f"  embedded {min(first + batch, len(contents))} of {len(contents)} passages ({rate:.0f}/s)", flush=True
            )
    manifest = Manifest(encoder.name, encoder.dimensions, len(contents), sha256(corpus))
    with drafted(folder, replace=True) as draft:
        faiss.write_index(index, str(draft / "index.faiss"))
        np.save(draft / "offsets.npy", np.array(offsets, dtype=np.int64))
        shutil.copy(corpus, draft / "passages.jsonl")
        (draft / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return manifest


def sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an index. Raises FileNotFoundError or ValueError, which name the remedy."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no index: build one with tools/index CORPUS --out {folder}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): build the index anew with tools/index") from None


class Index:
    """A loaded index with its encoder. It is on the GPUs if FAISS finds any."""

    def __init__(self, folder: Path, encoder: Encoder):
        self.manifest = read_manifest(folder)
        if (self.manifest.encoder, self.manifest.dimensions) != (encoder.name, encoder.dimensions):
            raise ValueError(
                f"index {folder} was made by encoder {self.manifest.encoder} ({self.manifest.dimensions} dimensions), not"
                f" {encoder.name} ({encoder.dimensions}): use that encoder, or build the index anew with tools/index"
            )
        self.encoder = encoder
        self.faiss = faiss.read_index(str(folder / "index.faiss"))
        if hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0:
            self.faiss = faiss.index_cpu_to_all_gpus(self.faiss)  # pyright: ignore[reportAttributeAccessIssue]
        self.offsets = np.load(folder / "offsets.npy")
        self.corpus = (folder / "passages.jsonl").open("rb")

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        """Return the ``topk`` nearest passages of each query, best first."""
        scores, rows = self.faiss.search(self.encoder.embed(queries, "query"), min(topk, len(self.offsets)))
        return [list(self._passages(s, r)) for s, r in zip(scores, rows, strict=True)]

    def _passages(self, scores: np.ndarray, rows: np.ndarray) -> Iterable[Passage]:
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            self.corpus.seek(int(self.offsets[row]))
            entry = msgspec.json.decode(self.corpus.readline(), type=_Row)
            title, text = title_and_text(entry.contents)
            yield Passage(str(entry.id), title, text, score)
