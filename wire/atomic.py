"""Write a folder or a file so that it appears complete or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

DRAFT = ".draft"
"""The end of a file's or folder's name until it is complete."""


@contextlib.contextmanager
def drafted(out: Path, flag: str = "") -> Iterator[Path]:
    """Yield a draft folder beside ``out``, which becomes ``out`` at the end. Creating it shows before the work if ``out`` can be written.

    An exception during the work removes the draft. Raises OSError when ``out`` cannot be written. flag: the option that named ``out``.
    """
    draft = out.with_name(f"{out.name}{DRAFT}{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # a dead process that had our process id may have left one
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"{flag} {out} cannot be written: {error.strerror}; choose another folder".lstrip()) from None
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    try:
        draft.rename(out)
    except OSError as error:
        raise OSError(f"{flag} {out} cannot be written: {error.strerror}; all is in {draft}".lstrip()) from None


def as_json(value: Any) -> bytes:
    """Return ``value`` as indented JSON, the form of a run's and an evaluation's files."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def write_whole(path: Path, value: Any) -> None:
    """Write ``value`` as JSON. When the disk is full or the process dies, the file keeps its old content."""
    draft = path.with_name(f"{path.name}{DRAFT}")
    try:
        draft.write_bytes(as_json(value))
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
