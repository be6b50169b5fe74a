"""What processes do for themselves: log, write their stacks on a signal, end with their parent,
lock a file, run a function in a process of its own."""

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from coppice.common.terminal import visible

STACKS = signal.SIGUSR1
"""The signal that asks a process for the Python stacks of all threads. faulthandler answers in C,
also in a deadlock or an endless loop."""
FILES = 65536
"""Files that a process asks to open at once. Each worker is a connection of the scheduler, and the
usual limits are 256 or 1,024."""
_PR_SET_PDEATHSIG = 1
_SECRET = re.compile(
    r"(KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CRED|AUTH)S?(_|$)", re.IGNORECASE
)


class _Visible(logging.Formatter):
    """Writes what others wrote, such as a judge's error, without its control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def begin() -> None:
    """Must be called before the process does anything else. Everything goes to stderr, which is the
    log of a launched process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    errors = sys.__stderr__ or sys.stderr
    faulthandler.enable(errors)  # if native code ends the process, too
    faulthandler.register(STACKS, file=errors, all_threads=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def die_with(parent: int) -> None:
    """Have Linux kill this process, a child of ``parent``, when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def without_secrets(passed: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment for a program that is not ours: without the variables one
    of whose words ends in KEY, TOKEN, SECRET, PASSWORD, CREDENTIALS and the like, unless ``passed``
    names them."""
    kept = (name for name in os.environ if name in passed or not _SECRET.search(name))
    return {name: os.environ[name] for name in kept}


def free_port() -> int:
    """Return a port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def locked(path: Path, in_use: str) -> IO[str]:
    """Open ``path`` and lock it while it is open. Raises ValueError with the text ``in_use`` if
    another process holds the lock."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(in_use) from None
    return lock


class Killed(Exception):
    """The process ended without an answer, most likely because memory ran out."""


def starter() -> int:
    """Return the number of the process that started this one, also if it is another's fork."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def die_with_starter() -> None:
    """``die_with`` for a process of multiprocessing: when its parent dies, which is the one that
    started it, or the fork server that dies with that one."""
    die_with(os.getppid())
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # both died before
        os._exit(1)


def in_subprocess(function: Callable[..., Any], *arguments: Any, method: str = "spawn") -> Any:
    """Return what ``function`` returns in a process of its own, whose memory (gigabytes that an
    allocator would keep) is freed at its end. Arguments and result are pickled, but only between
    our own processes.

    method: how multiprocessing starts the process. Raises what the function raises, and Killed. An
    interruption also ends the other process, after that process has cleaned up.
    """
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    # The process is not a daemon, because the function may itself call ``in_subprocess``.
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    try:
        process.start()
    except (EOFError, ConnectionError):  # the fork server was killed
        raise Killed from None
    theirs.close()
    try:
        result, error = ours.recv()
    except EOFError:
        raise Killed from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
        ours.close()
    if error is not None:
        raise error
    return result


def _answer(channel: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller passes an interruption on, once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answer = function(*arguments), None
    except Exception as error:  # noqa: BLE001
        answer = None, error
    except KeyboardInterrupt:
        sys.exit(130)  # the caller reports the interruption
    with contextlib.suppress(BrokenPipeError):  # the caller has gone
        channel.send(answer)
