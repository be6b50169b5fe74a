"""Turns on GPUs that a learner shares with the engines of its run. Invariant: the learner has its
turn only while no engine has one, also after ``kill -9``: turns are locks of the system, which end
with the last process that holds them.

An engine repeats ``enter``, ``called``, ``leave``, the learner ``take`` and ``give``.
"""

import asyncio
import fcntl
import os
from pathlib import Path

LOOK_S = 0.02
"""Seconds between two looks of an engine at the locks."""


class Turns:
    """One process's view of two locks in ``folder``: who wants the GPUs, and who has them. held:
    the second one's file, which engines' servers inherit, since they may outlive the engine."""

    def __init__(self, folder: Path):
        paths = folder / "gpus-wanted", folder / "gpus-held"
        self._wanted, self.held = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in paths)

    async def called(self) -> None:
        """Wait until the learner wants the GPUs."""
        while _shared(self._wanted):
            fcntl.flock(self._wanted, fcntl.LOCK_UN)
            await asyncio.sleep(LOOK_S)

    async def enter(self) -> None:
        """Begin an engine's turn, once the learner neither has nor wants its own."""
        while not _shared(self._wanted):
            await asyncio.sleep(LOOK_S)
        # the learner takes its turn with both locks
        fcntl.flock(self.held, fcntl.LOCK_SH)
        fcntl.flock(self._wanted, fcntl.LOCK_UN)

    def leave(self) -> None:
        """End an engine's turn."""
        fcntl.flock(self.held, fcntl.LOCK_UN)

    def take(self) -> None:
        """Begin the learner's turn: call the engines, and wait until none has the GPUs."""
        fcntl.flock(self._wanted, fcntl.LOCK_EX)
        fcntl.flock(self.held, fcntl.LOCK_EX)

    def give(self) -> None:
        """End the learner's turn."""
        fcntl.flock(self.held, fcntl.LOCK_UN)
        fcntl.flock(self._wanted, fcntl.LOCK_UN)


def _shared(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
