"""The digest of a set of named tensors, which is the same on every machine and does not depend on
their order; and the digests of files."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

THREADS, BLOCK = 4, 2**24
"""Threads that read or write a file at once, and bytes that each holds."""
_MOST_HEADER_BYTES = 100 * 2**20
"""The largest header that the safetensors format allows."""


class Entry(msgspec.Struct):
    """A tensor of a safetensors file. data_offsets: from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def total(hashed: Iterable[tuple[str, str, Iterable[int], str]]) -> str:
    """Return the SHA-256 (hex) over tensors: over the names (sorted), the dtypes as safetensors
    spells them ("BF16"), the shapes, and the SHA-256 (hex) of the contiguous bytes."""
    whole = hashlib.sha256()
    for name, dtype, shape, own in sorted(hashed, key=lambda item: item[0]):
        whole.update(f"{name}\0{dtype}\0{list(shape)}\0{own}\0".encode())
    return whole.hexdigest()


def safetensors_file(path: Path) -> str:
    """Return the digest (see ``total``) of a safetensors file, which several threads read. Raises
    ValueError for a damaged file."""
    start, entries = layout(path)
    with path.open("rb") as opened, ThreadPoolExecutor(THREADS) as pool:

        def own(entry: Entry) -> str:
            begin, end = (start + offset for offset in entry.data_offsets)
            places = range(begin, end, BLOCK)
            return sha(os.pread(opened.fileno(), min(BLOCK, end - at), at) for at in places)

        hashes = list(pool.map(own, entries.values()))
    pairs = zip(entries.items(), hashes, strict=True)
    return total((name, entry.dtype, entry.shape, one) for (name, entry), one in pairs)


def layout(path: Path) -> tuple[int, dict[str, Entry]]:
    """Return where the data of a safetensors file begins (after an 8-byte length and a JSON header)
    and its tensors. Raises ValueError for a damaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(
                f"{path}: {size} bytes are not a whole safetensors file; write it again"
            )
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    entries = {name: msgspec.json.decode(header[name], type=Entry) for name in sorted(header)}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{path}: tensor {name} is beyond the file; write it again")
    return 8 + length, entries


def file(path: Path, drop: bool = True) -> str:
    """Return the SHA-256 (hex) of a file. drop: as the disk holds it: its pages in the page cache
    are dropped first, where the system can. Raises OSError."""
    with path.open("rb") as opened:
        if drop and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(opened, "sha256").hexdigest()


SUMS = "SHA256SUMS"
"""The file with the digests of a folder's other files, in the form that ``sha256sum --check``
reads."""


def sums(folder: Path) -> dict[str, str]:
    """Return the digests in a folder's SHA256SUMS by file name. Raises OSError if there is none,
    ValueError if a line is no digest."""
    lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
    return {name: value for value, name in (line.split("  ", 1) for line in lines)}


def write_sums(folder: Path, digests: dict[str, str]) -> None:
    """Write a folder's SHA256SUMS. Raises OSError."""
    text = "".join(f"{value}  {name}\n" for name, value in sorted(digests.items()))
    (folder / SUMS).write_text(text, encoding="ascii")


def sha(blocks: Iterable[bytes | memoryview]) -> str:
    whole = hashlib.sha256()
    for block in blocks:
        whole.update(block)
    return whole.hexdigest()
