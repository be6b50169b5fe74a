"""Read JSONL files that people write: one JSON value per line. Errors name the file and the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


def content(path: Path, expected: str, flag: str = "") -> bytes:
    """Return the bytes of a file. Raises ValueError saying what the file should hold (``expected``). flag: the option that named the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror}): expected a file of {expected}"
        raise ValueError(f"{flag} {problem}".lstrip()) from None


def lines(path: Path, kind: Any, expected: str, flag: str = "") -> Iterator[tuple[int, Any]]:
    """Yield the number and the value (a ``kind``) of each line that is not empty. Raises ValueError like ``content``, or naming the bad line."""
    for number, line in enumerate(content(path, f"lines of {expected}", flag).splitlines(), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}:{number}: {error}; expected {expected}") from None
