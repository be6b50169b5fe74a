"""Processes that are forks of this one, which has imported everything: importing torch again for
each start would take most of a run of chaos.

A fork stands where ``coppice launch`` starts an interpreter. It has its own environment, its own
signals and no open file but its log.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

_POLL_S = 0.02


class Fork:
    """A child process with the methods of ``subprocess.Popen`` that the launcher uses. work: what
    it does; its end is the process's end."""

    def __init__(
        self,
        work: Callable[[], Any],
        stdout: IO[Any] | int,
        env: dict[str, str],
        preexec_fn: Callable[[], None],
        stderr: IO[Any] | int = subprocess.STDOUT,
    ):
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        reading, writing = os.pipe() if stdout == subprocess.PIPE else (-1, stdout.fileno())  # pyright: ignore
        errors = writing if stderr == subprocess.STDOUT else stderr.fileno()  # pyright: ignore
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                status = _live(work, writing, errors, env, preexec_fn)
            finally:  # even if the disk of the log is full, no child may go on as its parent
                os._exit(status)
        if reading >= 0:
            os.close(writing)
            self.stdout = os.fdopen(reading, "rb")

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and timeout is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def _live(
    work: Callable[[], Any], out: int, errors: int, env: dict[str, str], preexec: Callable[[], None]
) -> int:
    """Be the child, and return its exit status. Nothing of the parent is finalized here: its files
    may have the numbers of others by then."""
    gc.freeze()
    try:
        preexec()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((os.dup(out), 1), (os.dup(errors), 2), (null, 0)):
            os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.clear()
        os.environ.update(env)
        work()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
