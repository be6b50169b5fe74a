"""One digest for a set of named tensors, the same on every machine and in every order of iteration."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

Named = tuple[str, str, tuple[int, ...], bytes | memoryview]
"""name, dtype name, shape, contiguous bytes."""


def tensors(items: Iterable[Named]) -> str:
    """SHA-256 (hex) over names (sorted), dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, dtype, shape, buffer in sorted(items, key=lambda item: item[0]):
        total.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        total.update(buffer)
    return total.hexdigest()


def safetensors_file(path: Path) -> str:
    """Digest of a safetensors file by its tensors, read without any tensor library (header: 8 bytes length + JSON)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(length))
        start = 8 + length
        header.pop("__metadata__", None)
        total = hashlib.sha256()
        for name in sorted(header):
            entry = header[name]
            total.update(f"{name}\0{entry['dtype']}\0{list(entry['shape'])}\0".encode())
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            total.update(file.read(end - begin))
    return total.hexdigest()
