"""Where the seconds of an update go."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

PREFIX = "time/update_"


class Stopwatch:
    """Seconds of named phases. A phase that begins inside another one interrupts it, so every
    moment counts once, and the phases of an update sum to no more than its time. On a GPU a phase
    ends when its kernels are launched, and the wait for them falls to the phase that reads a
    result."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside to ``phase``."""
        self._turn()
        self._open.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call as metrics, ``time/update_PHASE``."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return {f"{PREFIX}{phase}": seconds for phase, seconds in taken.items()}
