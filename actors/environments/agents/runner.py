"""Entry point of the processes of agents. It imports only the standard library and the agent, so
that an episode begins at once, also in another Python.

``python runner.py MODULE:FUNCTION FD`` imports what the module imports, once, and then forks an
episode for each one that ``actors.environments.agents.episode`` asks for over the socket FD.
Episodes tell what libraries import later, so that it is there for those that follow. The module
itself is imported in the episode's process, which knows the episode's key by then. A number that
the function returns is the episode's reward. With "" for the function, episodes are command lines.

An episode is two processes. The keeper adopts whatever the agent's own process leaves behind
(PR_SET_CHILD_SUBREAPER), and ends as that one ends, after it has killed all of it::

    scheduler -> fork server (serve) -> keeper (_keep) -> agent (_episode) -> whatever it starts
"""

import ast
import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

REWARD = b"\0reward "
"""Begins the line with the reward that the function returned."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS = {signal.SIGTERM, signal.SIGCHLD}
"""A keeper waits for these signals: the order to end its episode, and the end of a child."""


def play(run: str, task: dict[str, Any]) -> None:
    """Call the function, whose random numbers depend on the task alone; print what it returns."""
    random.seed(f"{task['id']}/{task['seed']}")
    module, _, name = run.partition(":")
    result = getattr(importlib.import_module(module), name)(task)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if result is None:
        return
    try:
        reward = math.nan if isinstance(result, str | bytes) else float(result)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        wish = "expected a finite number, the episode's reward, or None for no reward"
        raise ValueError(f"{run} returned {str(result)[:200]!r}: {wish}")
    with contextlib.suppress(Exception):  # the agent may have put anything there
        sys.stdout.flush()
    os.write(1, b"\n" + REWARD + json.dumps(reward).encode() + b"\n")


async def _awaited(result: Any) -> Any:
    return await result


def serve(run: str, channel: socket.socket) -> None:
    """Fork an episode for every byte that comes, with its files; tell each start and end."""
    here, package = os.getcwd(), str(Path(__file__).parent)
    sys.path[:] = [here, *(place for place in sys.path if place not in ("", here, package))]
    if run:
        _preload(run.partition(":")[0])
    # Ctrl-C is for the run, which ends its episodes itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heard, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    late, tell = os.pipe()
    while True:
        ready, _, _ = select.select([channel, heard, late], [], [])
        if late in ready:
            _import(os.read(late, 1 << 16).decode().split("\n")[:-1])
        if heard in ready:
            heard.recv(4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    _tell(channel, {"ended": ended[0], "code": code})
        if channel in ready:
            order, files, _, _ = socket.recv_fds(channel, 1, 2)
            if not order:
                return
            server, pid = os.getpid(), os.fork()
            if not pid:
                for one in (channel, heard, told):
                    one.close()
                os.close(late)
                _keep(run, server, files, tell)
            for file in files:
                os.close(file)
            _tell(channel, {"born": pid})


def _tell(channel: socket.socket, event: dict[str, int]) -> None:
    channel.sendall(json.dumps(event).encode() + b"\n")


def _keep(run: str, server: int, files: list[int], tell: int) -> NoReturn:
    """Be an episode's keeper: start the agent's process with a folder of its own, wait for its end
    or for SIGTERM, kill whatever it has left, and end as it ended."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != server:  # it died before
        os._exit(1)
    folder = tempfile.mkdtemp(prefix="coppice-agent-")
    leader = os.fork()
    if not leader:
        _episode(run, files, folder, tell)
    for file in files:
        os.close(file)
    code = None
    while code is None and signal.sigwait(_ENDS) != signal.SIGTERM:
        code = _reaped(leader)
    for kill in (os.killpg, os.kill):  # it may have no group of its own yet
        with contextlib.suppress(OSError):
            kill(leader, signal.SIGKILL)
    if code is None:
        code = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    _clear()
    shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no disposition
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _control(option: int, value: int) -> None:
    """Set an attribute of this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reaped(leader: int) -> "int | None":
    """Reap what has died. Return the exit status of ``leader`` if it was among it."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return None
        if pid == leader:
            return os.waitstatus_to_exitcode(status)


def _clear() -> None:
    """Kill and reap all children and theirs. What has other rights than we stays."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                killed = 0
                for entry in Path("/proc").glob("[0-9]*/stat"):
                    with contextlib.suppress(OSError):  # it has gone, or may not be killed
                        if int(entry.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                            os.kill(int(entry.parent.name), signal.SIGKILL)
                            killed += 1
                if not killed:
                    return
                os.waitpid(-1, 0)


def _episode(run: str, files: list[int], folder: str, tell: int) -> NoReturn:
    """Be the agent's process, with a session and a group of its own. Its stdin holds a line of
    settings and then the task. tell: takes the names of modules that were imported late."""
    status, before = 1, set(sys.modules)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, file in enumerate((files[0], files[1], files[1])):
            os.dup2(file, target)
        for file in files:
            os.close(file)
        with open(0, "rb", closefd=False) as stdin:
            line = stdin.readline()
        os.lseek(0, len(line), os.SEEK_SET)
        settings = json.loads(line)
        os.environ.clear()
        os.environ.update(settings["environment"], COPPICE_FOLDER=folder)
        os.setsid()
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if settings["memory"]:
            resource.setrlimit(resource.RLIMIT_AS, (settings["memory"], settings["memory"]))
        if not run:
            _become(settings["command"])
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        play(run, json.loads(sys.stdin.read()))
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            for name in _libraries(set(sys.modules) - before):
                os.write(tell, name.encode() + b"\n")
        os._exit(status)


def _become(command: list[str]) -> NoReturn:
    """Run a command line in this process, with a shell's signals and no files but the three."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.execvp(command[0], command)


def _libraries(names: set[str]) -> list[str]:
    """The modules among ``names`` that are of Python or installed, not the episode's."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in names}
    return sorted(name for name, file in files.items() if _installed(file))


def _installed(file: str) -> bool:
    roots = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
    return file in ("built-in", "frozen") or file.startswith(roots) or "site-packages" in file


def _preload(module: str) -> None:
    """Import what the module imports at its top. Failures are told in the episode."""
    with contextlib.suppress(Exception):
        # not find_spec, which imports the packages above the module
        places = (Path(root, *module.split(".")) for root in sys.path)
        files = (f for p in places for f in (p.with_suffix(".py"), p / "__init__.py"))
        body = ast.parse(next(f for f in files if f.is_file()).read_text()).body
        for node in body:
            if isinstance(node, ast.Import):
                _import([alias.name for alias in node.names])
            elif isinstance(node, ast.ImportFrom) and not node.level:
                _import([str(node.module)])


def _import(names: list[str]) -> None:
    for name in names:
        # what is not installed is the agent's own, and may read the episode's key as it is imported
        with contextlib.suppress(Exception, SystemExit):
            spec = importlib.util.find_spec(name.partition(".")[0])
            if name in sys.modules or (spec and _installed(spec.origin or "")):
                importlib.import_module(name)


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
