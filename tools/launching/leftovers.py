"""Removes shared memory that killed processes of a run left in ``/dev/shm``, where it would stay
until the machine restarts.

torch, multiprocessing and SGLang unlink their segments when a process ends in order, and torch's
manager does so after a kill as well.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
_SEGMENT = re.compile(rf" ({FOLDER}/(?:torch_\d+_|psm_|sem\.mp-|sglang_)[^/\s]+)$", re.MULTILINE)
"""Names that these libraries choose. A user's own files there, such as a model's weights, are left
alone."""


def mapped(pids: Iterable[int]) -> set[str]:
    """Return the segments that processes and their descendants map."""
    segments: set[str] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(OSError):
                    segments |= set(_SEGMENT.findall(Path(f"/proc/{member.pid}/maps").read_text()))
    return segments


def sweep(segments: set[str]) -> None:
    """Remove those of ``segments`` that are still there although no process maps them."""
    left = {segment for segment in segments if Path(segment).exists()}
    for segment in left - mapped(psutil.pids()) if left else ():
        with contextlib.suppress(OSError):
            Path(segment).unlink()
