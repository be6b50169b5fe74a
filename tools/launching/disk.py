"""The disk of a run: where a folder can be made, how a path is shown, and what is said of a disk
that is full."""

import shlex
import shutil
from pathlib import Path

_FULL_BYTES = 2**24
"""Bytes of free space below which the disk counts as full: the weights of one version, or minutes
of logs, do not fit into less."""


def existing(path: Path) -> Path:
    """Return ``path`` if it exists, or its nearest parent that exists (which may be a file where a
    folder is needed)."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def no_space(run: Path) -> str:
    """Return the message for a full disk of the run, with the remedy."""
    again = resume_command(run) if (run / "config.json").is_file() else "start again"
    return f"{shown(run)}'s disk has {_free_bytes(run) / 1e6:.1f} MB free: the processes cannot write; free some, then {again}"


def full(run: Path) -> bool:
    """True if the disk of a run has hardly any free space."""
    return _free_bytes(run) < _FULL_BYTES


def _free_bytes(run: Path) -> int:
    return shutil.disk_usage(existing(run)).free


def shown(path: Path) -> Path:
    """Return ``path`` relative to the current folder where possible."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def resume_command(run: Path) -> str:
    """Return the command that goes on with a run, as a shell takes it."""
    return f"coppice launch --resume {shlex.quote(str(shown(run)))}"
