"""A folder or a file that appears whole or not at all: it is written as a draft beside its place,
then renamed. ``begin`` and ``finish`` are for folders that several processes write together."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

DRAFT = ".draft"
"""The end of a file's or folder's name until it is complete."""


def fresh(folder: Path) -> Path:
    """Make ``folder``, or the first of folder-2, folder-3, ... that nobody has, and return it.
    Raises OSError."""
    place, number = folder, 1
    while True:
        try:
            place.mkdir(parents=True)
            return place
        except FileExistsError:
            if not os.path.lexists(place):  # a folder above it is a link to nothing
                raise
            number += 1
            place = folder.with_name(f"{folder.name}-{number}")


def draft_of(out: Path, alone: bool = False) -> Path:
    """The draft that becomes ``out``. alone: no other process writes ``out``, so the draft that a
    dead one left is written over."""
    return out.with_name(f"{out.name}{DRAFT}{'' if alone else os.getpid()}")


def begin(draft: Path) -> None:
    """An empty draft folder. Raises OSError."""
    shutil.rmtree(draft, ignore_errors=True)  # of a dead process with our number
    draft.mkdir(parents=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish(draft: Path, out: Path, durable: bool = False) -> None:
    """The draft becomes ``out``, in place of what was there. Raises OSError.

    durable: when this returns, files and names are on the disk, and a power cut before leaves what
    was there or all of it.
    """
    for path in (*draft.iterdir(), draft) if durable else ():
        sync(path)
    shutil.rmtree(out, ignore_errors=True)
    draft.rename(out)
    for path in (out.parent, out.parent.parent) if durable else ():
        sync(path)


@contextlib.contextmanager
def drafted(
    out: Path, flag: str = "", replace: bool = False, alone: bool = False
) -> Iterator[Path]:
    """A draft folder that becomes ``out`` at the end; an exception removes it. It is made before
    the work, so that an ``out`` that cannot be written is known then.

    flag: the option that named ``out``. replace: a folder that is there gives way; otherwise only
    an empty one does. alone: see ``draft_of``. Raises OSError.
    """
    draft, name = draft_of(out, alone), f"{flag} {out}".lstrip()
    empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    if not replace and os.path.lexists(out) and not empty:
        told = f"{name} exists and is no empty folder"
        raise OSError(f"{told}: choose another folder, or remove that one")
    try:
        begin(draft)
    except OSError as error:
        raise OSError(
            f"{name} cannot be written: {error.strerror}; choose another folder"
        ) from None
    try:
        yield draft
        # which the library gives to their owner alone, whatever the umask
        for weights in draft.glob("*.safetensors"):
            weights.chmod(draft.stat().st_mode & 0o666)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    try:
        finish(draft, out) if replace else draft.rename(out)
    except OSError as error:
        raise OSError(f"{name} cannot be written: {error.strerror}; all is in {draft}") from None


def as_json(value: Any) -> bytes:
    """Return ``value`` as indented JSON, the form of a run's and an evaluation's files."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def write_whole(path: Path, value: Any, alone: bool = True, durable: bool = False) -> None:
    """``value`` as JSON, or bytes as they are; a full disk or the process's death leaves what was
    there before. alone: see ``draft_of``. durable: a power cut does, too."""
    draft = draft_of(path, alone)
    try:
        draft.write_bytes(value if isinstance(value, bytes) else as_json(value))
        if durable:
            sync(draft)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
