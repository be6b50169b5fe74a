"""The command tools/index: embed a Search-R1 corpus (JSONL of {id, contents}) into an index folder."""

import argparse
import os
import time
from pathlib import Path

from judges.retriever.encoder import Encoder
from judges.retriever.index import BadCorpus, build, read_manifest, sha256


def ensure_index(corpus: Path, encoder: str, cache: Path, threads: int) -> Path:
    """Return the cached index of ``corpus``, after building it if it is absent."""
    out = cache / "indexes" / f"{encoder.replace('/', '_')}-{sha256(corpus)[:16]}"
    if not (out / "manifest.json").is_file():
        print(f"indexing {corpus} with {encoder} (cached afterwards)", flush=True)
        build(corpus, out, Encoder(encoder, threads))
    read_manifest(out)
    return out


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="tools/index", description="Build a retrieval index.")
    parser.add_argument("corpus", type=Path, help="JSONL of {id, contents}; contents = quoted title, newline, text")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--encoder", default="minilm", help='"minilm", or a folder or hub name (a name with e5 gets E5 prefixes)'
    )
    parser.add_argument("--skip-bad", action="store_true", help="pass over malformed lines (they are printed)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    start = time.monotonic()
    try:
        manifest = build(
            options.corpus, options.out, Encoder(options.encoder, options.threads), skip_bad=options.skip_bad
        )
    except (BadCorpus, OSError) as error:
        parser.exit(2, f"tools/index: {error}\n")
    print(f"{manifest.passages} passages in {options.out} after {time.monotonic() - start:.0f} s")
