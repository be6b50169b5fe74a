"""Read JSON and JSONL files that people write. Errors name the file, and of JSONL the line."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for text that is no JSON of the expected kind."""
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"\x00\x00\xfe\xff")


def beginning(path: Path) -> int:
    """Return where the text of a UTF-8 file begins: behind its byte order mark, if it has one.

    Raises ValueError for a file in UTF-16 or UTF-32, of which no line can be read, and OSError.
    """
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(_MARKS) or b"\x00" in head:
        raise ValueError(f"{path} is in UTF-16 or UTF-32: convert it with iconv -f UTF-16 -t UTF-8")
    return len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0


def fault(error: Exception) -> str:
    """Return what is wrong with a line that could not be decoded."""
    # msgspec 0.23 raises a DecodeError instead
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
        return f"not in UTF-8 ({error}): convert the file from its encoding, such as Latin-1"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def content(path: Path, expected: str, flag: str = "") -> bytes:
    """Return the bytes of a UTF-8 file without its byte order mark. Raises ValueError saying what
    the file should hold (``expected``). flag: the option that named the file."""
    try:
        return path.read_bytes()[beginning(path) :]
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror}): expected a file of {expected}"
        raise ValueError(f"{flag} {problem}".lstrip()) from None


def whole(path: Path, kind: Any, expected: str) -> Any:
    """Return the value (a ``kind``) of a JSON file. Raises FileNotFoundError and ValueError, which
    say what the file should hold (``expected``)."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}; expected {expected}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except MALFORMED as error:
        raise ValueError(f"{path}: {fault(error)}; expected {expected}") from None


def readable(path: Path, kind: type[T]) -> T | None:
    """Return the value (a ``kind``) of a JSON file, or None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *MALFORMED):
        return None


def lines(path: Path, kind: Any, expected: str, flag: str = "") -> Iterator[tuple[int, Any]]:
    """Yield the number and the value (a ``kind``) of each line that is not empty. Raises ValueError
    like ``content``, or naming the bad line."""
    for number, line in enumerate(content(path, f"lines of {expected}", flag).splitlines(), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=kind)
            except MALFORMED as error:
                raise ValueError(f"{path}:{number}: {fault(error)}; expected {expected}") from None
