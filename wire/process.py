"""What every process of a run does first: it logs, and it writes the Python stacks of all its threads to its log on SIGUSR1."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys

STACKS = signal.SIGUSR1
"""The signal that asks a process for its stacks. faulthandler answers in C, so that a deadlock or an endless loop answers as well."""
_PR_SET_PDEATHSIG = 1


def begin() -> None:
    """Must be called before the process does anything else. Everything goes to stderr, which is the log of a launched process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    faulthandler.register(STACKS, file=sys.__stderr__ or sys.stderr, all_threads=True)


def die_with(parent: int) -> None:
    """Have this process, a child of ``parent``, killed when its parent dies. Linux alone can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)
