"""JSONL files that people write: one JSON value per line, with errors that name the file and the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


def content(path: Path, expected: str, flag: str = "") -> bytes:
    """The bytes of a file. Raises ValueError saying what was ``expected`` there; flag: the option that named the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be read ({error.strerror}): expected a file of {expected}".lstrip()
        ) from None


def lines(path: Path, kind: Any, expected: str, flag: str = "") -> Iterator[tuple[int, Any]]:
    """(line number, value of type ``kind``) of each line that is not empty. Raises ValueError as ``content`` does, or naming the line."""
    for number, line in enumerate(content(path, f"lines of {expected}", flag).splitlines(), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}:{number}: {error}; expected {expected}") from None
