"""A folder or a file that appears whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

DRAFT = ".draft"
"""Ends the name of what is not whole yet."""


@contextlib.contextmanager
def drafted(out: Path, flag: str = "") -> Iterator[Path]:
    """A draft folder beside ``out``, made before the work so that an ``out`` that cannot be written is known then; at the end it is ``out``.

    What ends the work early removes it. Raises OSError; flag: the option that named ``out``.
    """
    draft = out.with_name(f"{out.name}{DRAFT}{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)  # of a dead process with our number
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
    """``value`` as the files of a run or an evaluation have it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def write_whole(path: Path, value: Any) -> None:
    """``value`` as JSON; a full disk or the process's death leaves what was there before."""
    draft = path.with_name(f"{path.name}{DRAFT}")
    try:
        draft.write_bytes(as_json(value))
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
