"""The digest of a set of named tensors, which is the same on every machine and does not depend on
their order; and the digests of files."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

Named = tuple[str, str, tuple[int, ...], bytes | memoryview]
"""The name of a tensor, its dtype as safetensors spells it ("BF16"), its shape and its contiguous
bytes."""

_MOST_HEADER_BYTES = 100 * 2**20
"""The largest header that the safetensors format allows."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def tensors(items: Iterable[Named]) -> str:
    """Return the SHA-256 (hex) over the names (sorted), dtypes, shapes and bytes of the tensors."""
    return _total(sorted(items, key=lambda item: item[0]))


def safetensors_file(path: Path) -> str:
    """Return the digest (see ``tensors``) of a safetensors file, one tensor in memory at a time.
    Raises ValueError for a damaged file."""
    return _total(each(path))


def each(path: Path) -> Iterator[Named]:
    """Yield the tensors of a safetensors file (8-byte length, JSON header, data), sorted by name.
    Raises ValueError for a damaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(
                f"{path}: {size} bytes are not a whole safetensors file; write it again"
            )
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        for name in sorted(header):
            entry = msgspec.json.decode(header[name], type=_Entry)
            begin, end = entry.data_offsets
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{path}: tensor {name} is beyond the file; write it again")
            file.seek(8 + length + begin)
            yield name, entry.dtype, tuple(entry.shape), file.read(end - begin)


def file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file as the disk holds it: its pages in the page cache are
    dropped first, where the system can. Raises OSError."""
    with path.open("rb") as opened:
        if hasattr(os, "posix_fadvise"):
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


def _total(ascending: Iterable[Named]) -> str:
    total = hashlib.sha256()
    for name, dtype, shape, buffer in ascending:
        total.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        total.update(buffer)
    return total.hexdigest()
