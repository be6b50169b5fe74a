"""Processes of a run that are forks of a server, which has imported everything: importing torch for
each process costs more than all the updates of a small run.

``python -m tests.forks`` is the server. A fork of it is the launcher, whose children are its forks.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
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
from coppice.tools.launching.processes import process_variables

ROOT = Path(__file__).parent.parent
_POLL_S = 0.02
_TITLE = 1000
"""Bytes of the server's command line, in which forks write theirs."""
_WHEN_LOADED = process_variables(1) | {"MALLOC_ARENA_MAX": "2"}
"""Libraries read these when they are loaded, which happens once for all forks. With one thread the
server starts no pool of threads, which a fork would not have."""
_MODULES = """
coppice.actors.engines.local coppice.actors.worker coppice.judges.exact_match coppice.judges.serve
coppice.judges.retriever.encoder coppice.judges.retriever.index coppice.judges.retriever.worker
coppice.judges.slate coppice.learner.main coppice.scheduler.main coppice.tools.launching.command
coppice.tools.launching.serve_model coppice.tools.launching.set_up
""".split()
"""What the processes of a run import."""


class Fork:
    """A child process that does ``work``, with the methods of ``Popen`` that the launcher uses."""

    def __init__(
        self,
        work: Callable[[], Any],
        stdout: IO[Any] | int,
        env: dict[str, str],
        preexec_fn: Callable[[], None],
        stderr: IO[Any] | int = subprocess.STDOUT,
        cwd: None = None,
    ):
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        piped = stdout == subprocess.PIPE
        reading, writing = os.pipe() if piped else (-1, stdout.fileno())  # pyright: ignore
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
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
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


class Launched(Fork):
    """A launcher that is a fork of the server."""

    def __init__(self, server: "Server", pid: int):
        self.server, self.pid, self.returncode = server, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})
        return self.returncode


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
    ) -> Launched:
        request = {"arguments": arguments, "cwd": str(cwd), "env": env, "begin": begin}
        return Launched(self, self.ask(request, [out.fileno()]))

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
    for module in _MODULES:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork has only the thread that forked"
    gc.collect()
    gc.freeze()
    launchers: dict[int, Fork] = {}
    while True:
        message, files, _, _ = socket.recv_fds(connection, 2**20, 1)
        if not message:
            return
        request = json.loads(message)
        if "poll" in request:
            answer = launchers[request["poll"]].poll()
        else:
            with os.fdopen(files[0], "ab") as out:
                work = partial(_launch, request["arguments"], request["cwd"], request["begin"])
                launcher = Fork(work, out, request["env"], partial(die_with, os.getpid()))
            answer = launcher.pid
            launchers[answer] = launcher
        connection.send(json.dumps(answer).encode())


def _launch(arguments: Sequence[str], cwd: str, begin: str) -> None:
    from coppice.tools.launching import command

    os.setsid()
    os.chdir(cwd)
    _begin("coppice launch", arguments, begin)
    popen, get_context = subprocess.Popen, multiprocessing.get_context

    def start(command: Sequence[str], **options: Any) -> Any:
        if [*command[:2]] == [sys.executable, "-m"] and command[2] in _MODULES:

            def work() -> None:
                subprocess.Popen = popen  # pyright: ignore[reportAttributeAccessIssue]
                multiprocessing.get_context = get_context  # pyright: ignore
                _become(*command[2:], begin=begin)

            return Fork(work, **options)
        return popen(command, **options)

    subprocess.Popen = start  # pyright: ignore[reportAttributeAccessIssue]
    # the set-up is a fork too, which has what it would import
    multiprocessing.get_context = lambda method=None: get_context("fork")  # pyright: ignore
    sys.exit(command.main())


def _become(module: str, file: str, begin: str) -> None:
    import torch

    from coppice import scheduler

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    scheduler.STARTED = time.monotonic()
    _begin(module, [file], begin)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _begin(name: str, arguments: Sequence[str], begin: str) -> None:
    """Be a Python that was started in this folder with this environment and these arguments."""
    sys.argv = [name, *arguments]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.getcwd(), *(path for path in paths if path not in sys.path)]
    _show(["python", "-m", name, *arguments])
    if begin:
        module, _, function = begin.partition(":")
        getattr(importlib.import_module(module), function)()


def _show(words: Sequence[str]) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    text = "\0".join(words).encode()[: last - first - 1]
    ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)


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


if __name__ == "__main__":
    main()
