"""Whose fault an exception is that ends a tree: the tree's, which is quarantined, or the run's."""

import asyncio
import contextlib
import errno
import sqlite3
import traceback
from collections.abc import Iterator

from coppice.scheduler.ledger.journal import JournalError

MACHINE = {getattr(errno, name) for name in "ENOSPC EDQUOT EROFS EIO EMFILE ENFILE ENOMEM".split()}
"""Errors of the system that the next tree would meet as well: a full disk, no more open files."""


def is_of_the_run(error: BaseException) -> bool:
    """Whether ``error``, no ``Fault``, is the run's and not that of the tree which it ended."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    machine = isinstance(error, OSError) and error.errno in MACHINE
    return machine or isinstance(error, JournalError | sqlite3.Error | MemoryError)


@contextlib.contextmanager
def plugged() -> Iterator[None]:
    """Turn into RuntimeError what no plug-in may raise, as asyncio ends a process for SystemExit:
    ``sys.exit()`` of a library, a panic of Rust code."""
    try:
        yield
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(brief(error)) from error


def traced(error: BaseException) -> str:
    """Return an exception in one line, and below it the traceback, without its lone surrogates."""
    text = f"{brief(error)}\n{''.join(traceback.format_exception(error))}"
    return text.encode(errors="backslashreplace").decode().strip()


def brief(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    return " ".join(text.split())
