"""Where the seconds of a process go."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "time/update_"
"""Begins the metric of a learner's phase. On a GPU a phase ends when its kernels are launched, and
the wait for them falls to the phase that reads a result."""


class Phases:
    """The running phase, and the seconds of all so far. Invariant: every moment belongs to one
    phase. ``over`` takes the whole time of its block, whatever phases are entered inside, but for
    the ``over`` blocks inside it, which interrupt it. start: when the phase ``first`` began."""

    def __init__(self, first: str = "", start: float = 0.0):
        self._name, self._since = first, start
        self._over: list[str] = []
        self._spent: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str, at: float | None = None) -> None:
        """Begin the phase ``name`` now, or at the earlier moment ``at`` after the last change."""
        self._book(at)
        self._name = name

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Count the time of the block for ``name``."""
        self._book()
        self._over.append(name)
        try:
            yield
        finally:
            self._book()
            self._over.remove(name)

    def now(self) -> str:
        return self._over[-1] if self._over else self._name

    def seconds(self) -> dict[str, float]:
        """Seconds per phase until now, in the order of their first time, without empty ones."""
        self._book()
        return {name: seconds for name, seconds in self._spent.items() if seconds}

    def take(self) -> dict[str, float]:
        """Return the seconds of the phases that ended since the last call, as metrics."""
        taken, self._spent = self._spent, defaultdict(float)
        return {f"{PREFIX}{phase}": seconds for phase, seconds in taken.items() if phase}

    def _book(self, at: float | None = None) -> None:
        now = time.monotonic() if at is None else at
        self._spent[self.now()] += now - self._since
        self._since = now
