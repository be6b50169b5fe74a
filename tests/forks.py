"""Processes of a run that are forks of a server, which has imported everything: importing torch for
each process costs more than all the updates of a small run.

``python -m tests.forks`` is the server. A fork of it is the launcher, whose children are its forks.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from coppice.common.process import die_with
from coppice.tools.launching import command, forks
from coppice.tools.launching.preloaded import MODULES
from coppice.tools.launching.processes import process_variables

ROOT = Path(__file__).parent.parent
_POLL_S = 0.02
_TITLE = 1000
"""Bytes of the server's command line, in which forks write theirs."""
_WHEN_LOADED = process_variables(1) | {"MALLOC_ARENA_MAX": "2"}
"""Libraries read these when they are loaded, which happens once for all forks. With one thread the
server starts no pool of threads, which a fork would not have."""


class Launcher:
    """A launcher that is a fork of the server, with the methods of ``Popen`` that tests use."""

    returncode: int | None = None

    def __init__(self, server: "Server", pid: int):
        self.server, self.pid = server, pid

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and timeout is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A client's view of the server, which ends with the client."""

    def __init__(self):
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), " " * _TITLE]
            env = os.environ | _WHEN_LOADED | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()])

    def launch(
        self, arguments: Sequence[str], cwd: Path, env: dict[str, str], out: IO[Any], begin: str
    ) -> Launcher:
        request = {"arguments": arguments, "cwd": str(cwd), "env": env, "begin": begin}
        return Launcher(self, self.ask(request, [out.fileno()]))

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            return json.loads(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def main() -> None:
    """Be the server until the client closes the connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork has only the thread that forked"
    gc.collect()
    gc.freeze()
    ended: dict[int, int] = {}
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 1)
        if not message:
            return
        request = json.loads(message)
        if (answer := request.get("poll")) is None:
            server, answer = os.getpid(), os.fork()
            if not answer:
                try:
                    os._exit(_live(server, files[0], **request))
                finally:  # even if the disk of the log is full, no child may go on as its parent
                    os._exit(1)
            os.close(files[0])
        else:
            pid, status = (0, 0) if answer in ended else os.waitpid(answer, os.WNOHANG)
            if pid:
                ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(answer)
        connection.send(json.dumps(answer).encode())


def _live(
    server: int, out: int, arguments: Sequence[str], cwd: str, env: dict[str, str], begin: str
) -> int:
    """Be a Python that was started as coppice launch in this folder, and return its exit status.
    Nothing of the parent is finalized here: its files may have the numbers of others by then."""
    gc.freeze()
    try:
        die_with(server)
        _handlers()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((out, 1), (out, 2), (null, 0)):
            os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.clear()
        os.environ.update(env)
        os.setsid()
        os.chdir(cwd)
        return _launch(arguments, begin)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _launch(arguments: Sequence[str], begin: str) -> int:
    sys.argv = ["coppice launch", *arguments]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.getcwd(), *(path for path in paths if path not in sys.path)]
    forks.show(["python", "-m", *sys.argv])
    first = [_handlers]
    if begin:
        module, _, function = begin.partition(":")
        first.append(getattr(importlib.import_module(module), function))
        first[-1]()
    # this process has what the server of a user's launcher would import, so it is that server
    forks.method, forks.serve, forks.end = "fork", lambda withheld: None, lambda: None
    for name in MODULES:
        process: Any = importlib.import_module(name)
        if main := getattr(process, "main", None):
            process.main = partial(_in_turn, *first, main)
    return command.main()


def _in_turn(*functions: Callable[[], Any]) -> None:
    for function in functions:
        function()


def _handlers() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
