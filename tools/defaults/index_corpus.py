"""The command coppice index: embed a Search-R1 corpus (JSONL of {id, contents}) into a folder."""

import argparse
import time
from pathlib import Path

from coppice.common.hardware import cores
from coppice.common.numbers import Count
from coppice.common.options import command_parser, gave_up
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.index import build, read_manifest
from coppice.wire import digest


def ensure_index(corpus: Path, encoder: str, cache: Path, threads: int) -> Path:
    """Return the cached index of ``corpus``, after building it if it is absent."""
    out = cache / "indexes" / f"{encoder.replace('/', '_')}-{digest.file(corpus, drop=False)[:16]}"
    if not (out / "manifest.json").is_file():
        print(f"indexing {corpus} with {encoder} (cached afterwards)", flush=True)
        build(corpus, out, Encoder(encoder, threads))
    read_manifest(out)
    return out


EXAMPLES = """\
  coppice index corpus.jsonl --out FOLDER        with the installed encoder
  coppice index wiki.jsonl --out FOLDER --encoder intfloat/e5-base-v2
  coppice index corpus.jsonl --out FOLDER --skip-bad
  coppice index wiki.jsonl --out SMALL --kind ivfpq --vectors FOLDER
then train on it: coppice launch --set retriever.backend=FOLDER"""


def parser() -> argparse.ArgumentParser:
    parser = command_parser("coppice index", "Build a retrieval index of a corpus.", EXAMPLES)
    corpus = "JSONL of {id, contents}; contents = quoted title, newline, text"
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help=corpus)
    out = "folder to write, new or empty"
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help=out)
    encoder = "minilm (default), or a folder or hub name (a name with e5 gets E5 prefixes)"
    parser.add_argument("--encoder", default="minilm", metavar="NAME", help=encoder)
    kind = "flat (exact, default), refined, hnsw, ivfpq or a factory string of FAISS"
    parser.add_argument("--kind", default="flat", help=kind)
    search = "search parameters of FAISS that the index gets, such as nprobe=128"
    parser.add_argument("--search", default="", metavar="TEXT", help=search)
    vectors = "a flat index of the same corpus, whose vectors are taken instead of embedding"
    parser.add_argument("--vectors", type=Path, metavar="INDEX", help=vectors)
    skip = "pass over malformed lines (they are printed)"
    parser.add_argument("--skip-bad", action="store_true", help=skip)
    threads = "compute threads (default: all processors, %(default)s)"
    parser.add_argument("--threads", type=Count, default=cores(), help=threads)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    start = time.monotonic()
    try:
        manifest = build(
            options.corpus, options.out, Encoder(options.encoder, options.threads),
            skip_bad=options.skip_bad, kind=options.kind, search=options.search,
            vectors=options.vectors,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        return gave_up("coppice index", error)
    size = (options.out / "index.faiss").stat().st_size / manifest.passages
    took = f"after {time.monotonic() - start:.0f} s: {manifest.kind}, {size:.0f} bytes each"
    print(f"{manifest.passages} passages in {options.out} {took}")
    return 0
