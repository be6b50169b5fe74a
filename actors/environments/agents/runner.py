"""What the processes of agents run that are Python functions. It imports nothing but the agent, so that an episode begins at once.

``python -m actors.environments.agents.runner MODULE:FUNCTION FD`` imports what the module imports, once, and then forks one process for each episode that
is asked for over the socket FD (``actors.environments.agents.nursery``). What libraries import later, episodes tell, and it is there for those that follow.
The module itself is imported in the episode's process, which knows the episode's key by then. A number that the function returns is the episode's reward.
"""

import ast
import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, NoReturn

REWARD = b"\0reward "
"""Begins the line with which a process tells what the function returned."""
_PR_SET_PDEATHSIG = 1


def confine(memory: int) -> None:
    """Limit this process's address space, bytes (0 for no limit), and give it a group, so that all it starts ends with it."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def play(run: str, task: dict[str, Any]) -> None:
    """Call the function with the task, and tell the number that it returns. The random numbers of an episode depend on its task alone."""
    random.seed(f"{task['id']}/{task['seed']}")
    module, _, name = run.partition(":")
    result = getattr(importlib.import_module(module), name)(task)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if result is not None:
        reward = json.dumps(float(result), allow_nan=False)
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\n" + REWARD + reward.encode() + b"\n")


async def _awaited(result: Any) -> Any:
    return await result


def serve(run: str, channel: socket.socket) -> None:
    """Fork an episode for every byte that comes, with the files that come with it as its stdin and stdout; tell each start and end in a line."""
    sys.path.insert(0, os.getcwd())
    _preload(run.partition(":")[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its episodes itself
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
            _bury(channel)
        if channel in ready:
            asked, files, _, _ = socket.recv_fds(channel, 1, 2)
            if not asked:
                return
            pid = os.fork()
            if not pid:
                _episode(run, files, [channel, heard, told], tell)
            for file in files:
                os.close(file)
            channel.sendall(json.dumps({"born": pid}).encode() + b"\n")


def _bury(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            line = {"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}
            channel.sendall(json.dumps(line).encode() + b"\n")


def _episode(run: str, files: list[int], inherited: list[socket.socket], tell: int) -> NoReturn:
    """Be the process of an episode. Its stdin holds a line of settings and then the task. tell: takes the names of modules that were imported late."""
    status, before = 1, set(sys.modules)
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in inherited:
            one.close()
        os.dup2(files[0], 0)
        os.dup2(files[1], 1)
        os.dup2(files[1], 2)
        settings = json.loads(sys.stdin.readline())
        os.environ.clear()
        os.environ.update(settings["environment"])
        confine(settings["memory"])
        play(run, json.loads(sys.stdin.read()))
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as Python itself ends a program
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            for name in _libraries(set(sys.modules) - before):
                os.write(tell, name.encode() + b"\n")
        os._exit(status)


def _libraries(names: set[str]) -> list[str]:
    """The modules among ``names`` that are of Python or installed, whose import says nothing of an episode."""
    roots = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in names}
    return sorted(name for name, file in files.items() if file.startswith(roots) or "site-packages" in file)


def _preload(module: str) -> None:
    """Import what the module imports at its top. Whatever fails here fails again, and is told, in the episode."""
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec(module)
        body = ast.parse(Path(str(spec and spec.origin)).read_text()).body
        names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in body if isinstance(node, ast.ImportFrom) and not node.level]
        _import(names)


def _import(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
