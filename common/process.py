"""What processes of a run do for themselves: they log, write the Python stacks of all threads to
the log on SIGUSR1, may open many files, find a port."""

import ctypes
import faulthandler
import logging
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Collection

STACKS = signal.SIGUSR1
"""The signal that asks a process for its stacks. faulthandler answers in C, so that a deadlock or
an endless loop answers as well."""
_PR_SET_PDEATHSIG = 1
_SECRET = re.compile(
    r"(KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CRED|AUTH)S?(_|$)", re.IGNORECASE
)
FILES = 65536
"""Files that a process asks to open at once. Each worker is a connection of the scheduler, and the
usual limits are 256 or 1,024."""


def begin() -> None:
    """Must be called before the process does anything else. Everything goes to stderr, which is the
    log of a launched process."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr
    )
    faulthandler.register(STACKS, file=sys.__stderr__ or sys.stderr, all_threads=True)
    many_files()


def many_files() -> None:
    """Raise the limit on open files to what the system grants without further rights, at most
    ``FILES``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def die_with(parent: int) -> None:
    """Have this process, a child of ``parent``, killed when its parent dies. Linux alone can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def without_secrets(passed: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment for a program that is not ours: without the variables one
    of whose words ends in KEY, TOKEN, SECRET, PASSWORD, CREDENTIALS and the like, unless ``passed``
    names them. It knows names alone: a secret in another variable passes."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in passed or not _SECRET.search(name)
    }


def free_port() -> int:
    """Return a port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
