"""The folder of an evaluation: claimed by one process, with settings that stay the same."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.atomic import DRAFT, fresh, write_whole
from coppice.common.jsonl import MALFORMED
from coppice.common.process import locked

SETTINGS = "evaluation.json"
IN_USE = "is in use by another process: stop it, or choose another --out"


def claim(
    out: Path, settings: msgspec.Struct, parts: Sequence[tuple[str, msgspec.Struct]] = ()
) -> Any:
    """Claim the folder for this evaluation alone. Returns the lock file, which holds the lock while
    it is open.

    parts: inner folders with their own settings. Raises ValueError if the folder holds another
    evaluation or cannot be written.
    """
    folders = [(out, settings), *((out / name, own) for name, own in parts)]
    with contextlib.ExitStack() as failed:
        try:
            if out.exists() and not out.is_dir():
                expected = "a folder of this evaluation, or one that does not exist yet"
                raise ValueError(f"--out {out} is a file: expected {expected}")
            ours = {"lock", f"{SETTINGS}{DRAFT}"}
            others = out.exists() and any(path.name not in ours for path in out.iterdir())
            if others and not (out / SETTINGS).is_file():
                something = f"holds something else (no {SETTINGS})"
                raise ValueError(f"--out {out} {something}: choose another folder")
            out.mkdir(parents=True, exist_ok=True)
            lock = failed.enter_context(locked(out / "lock", f"--out {out} {IN_USE}"))
            for folder, own in folders:
                check_same(folder / SETTINGS, own, f"--out {folder}")
            for folder, own in folders:
                folder.mkdir(exist_ok=True)
                keep(folder / SETTINGS, own, f"--out {folder}")
        except OSError as error:
            raise _unwritable(out, error) from None
        failed.pop_all()
    return lock


def _unwritable(out: Path, error: OSError) -> ValueError:
    reason = error.strerror or error
    return ValueError(f"--out {out} cannot be written ({reason}): choose another folder")


def own_folder(name: str) -> Path:
    """Make a folder for an evaluation that was given none: its name, and the time. Raises
    ValueError if it cannot be made."""
    out = Path("evaluations") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        return fresh(out)
    except OSError as error:
        raise _unwritable(out, error) from None


def check_same(saved: Path, settings: msgspec.Struct, subject: str) -> None:
    """Raises ValueError that names the first key in which ``saved``, if it exists, differs.
    subject: the work with these settings."""
    if not saved.is_file():
        return
    now = msgspec.json.decode(msgspec.json.encode(settings))
    try:
        before = msgspec.json.decode(saved.read_bytes(), type=dict[str, Any])
    except MALFORMED as error:
        remedy = "restore it from a copy, or choose another --out"
        raise ValueError(f"{saved} holds no settings ({error}): {remedy}") from None
    for key in sorted({*now, *before}):
        if (old := before.get(key)) != (new := now.get(key)):
            remedy = "give the same settings, or choose another --out"
            raise ValueError(
                f"{subject} was begun with {key} = {old!r}, now it is {new!r}: {remedy}"
            )


def keep(path: Path, settings: msgspec.Struct, subject: str) -> None:
    """Write the settings of work that may be continued later. Raises ValueError as ``check_same``
    does."""
    check_same(path, settings, subject)
    if not path.is_file():
        write_whole(path, settings)


def append(path: Path, row: Any) -> None:
    """Append one JSON line to a file. A reader calls ``cut_torn_tail`` first, then reads line by
    line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def cut_torn_tail(path: Path) -> None:
    """Remove an incomplete last line from a file, if the file exists. A full disk or a killed
    process leaves such a line."""
    if path.is_file():
        whole = path.read_bytes()
        kept = whole.rfind(b"\n") + 1
        if kept != len(whole):
            os.truncate(path, kept)
