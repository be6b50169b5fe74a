"""Processes of a run as forks of a server that has imported what they import. Importing torch in
each of them would take longer than the first updates of a small run.

Where there is a GPU, and elsewhere than on Linux, processes are started anew.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from coppice import scheduler
from coppice.common import hardware
from coppice.common.process import die_with_starter
from coppice.tools.launching import processes

SPAWN = "spawn"
method = SPAWN
"""How multiprocessing starts the processes of this launcher, its set-up too."""
_environment: dict[str, str] = {}
"""The server's variables."""
_TITLE = 1000
"""Bytes of the server's command line, in which forks write theirs."""


def serve(withheld: Collection[str]) -> None:
    """Start the server, which imports while the launcher goes on. withheld: variables of this
    process that only some processes of the run may see."""
    global method
    if sys.platform != "linux" or hardware.visible_gpus():
        return
    method = "forkserver"
    multiprocessing.set_forkserver_preload(["coppice.tools.launching.preloaded", " " * _TITLE])
    kept = {name: value for name, value in os.environ.items() if name not in withheld}
    # a fork has only the thread that forked, so the server's libraries start no threads
    _environment.update(processes.complete(kept, processes.process_variables(1)))
    _ensure_running()


def _ensure_running() -> None:
    """Start the server if it does not run, or was killed."""
    own = dict(os.environ)
    _become(_environment)
    try:
        forkserver.ensure_running()
    finally:
        _become(own)


def end() -> None:
    """End the server, and with it every fork that lives, even while it imports. The time of those
    that ended before counts as that of this process's children then."""
    if (pid := _server()._forkserver_pid) is not None:
        os.kill(pid, signal.SIGKILL)
        _server()._stop()


def _server() -> Any:
    return forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]


def _become(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class ForkedProcess:
    """A process of the plan, with the part of ``subprocess.Popen`` that the supervisor uses. log:
    where it writes. shown: its stdout is a pipe to the launcher instead."""

    def __init__(self, module: str, file: str, environment: dict[str, str], log: Path, shown: bool):
        reading, writing = multiprocessing.Pipe(duplex=False) if shown else (None, None)
        self._process = _started(module, file, environment, log, writing)
        self.pid: int = self._process.pid
        self.stdout: IO[bytes] | None = None
        if reading is not None and writing is not None:
            writing.close()
            self.stdout = os.fdopen(os.dup(reading.fileno()), "rb")

    def poll(self) -> int | None:
        status = self._process.exitcode
        # what multiprocessing says if the server was killed, and this process with it
        return -signal.SIGKILL if status == 255 else status

    def wait(self) -> int:
        self._process.join()
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)


def _started(*work: Any, tries: int = 2) -> Any:
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        _ensure_running()
    process = context.Process(target=_live, args=work)
    try:
        process.start()
    except (EOFError, ConnectionError):  # the server was killed at this moment
        if tries == 1:
            killed = "its fork server was killed twice, most likely for memory"
            raise OSError(f"{work[0]} cannot be started: {killed}") from None
        # until it is dead it would be asked again
        os.waitid(os.P_PID, _server()._forkserver_pid, os.WEXITED | os.WNOWAIT)
        return _started(*work, tries=tries - 1)
    return process


def _live(
    module: str, file: str, environment: dict[str, str], log: Path, shown: Connection | None
) -> None:
    """Be ``python -m module file``, started in this environment."""
    scheduler.STARTED = time.monotonic()
    os.setsid()
    die_with_starter()
    _become(environment)
    with log.open("ab") as errors:
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno() if shown is None else shown.fileno(), 1)
    for library, setter in (("torch", "set_num_threads"), ("faiss", "omp_set_num_threads")):
        if library in sys.modules:
            getattr(sys.modules[library], setter)(int(environment["OMP_NUM_THREADS"]))
    sys.path.insert(0, os.getcwd())  # as with -m
    sys.argv = [module, file]
    show(["python", "-m", module, file])
    importlib.import_module(module).main()


def show(words: list[str]) -> None:
    """Let ``ps`` show ``words`` as this process's command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    text = "\0".join(words).encode()[: last - first - 1]
    ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)
