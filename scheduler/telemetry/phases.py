"""Where the seconds of a run go. Invariant: every moment belongs to one phase, so the phases add up
to the time since the start. Pure but for the clock."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

LEARNER = {
    "learner/seconds": "updates",
    "time/publish": "publishing weights",
    "time/checkpoint": "checkpoints",
}
"""Metrics in the updates' records: the learner's seconds. The table has these names for them."""
LOADING = "time/spread"


class Phases:
    """The running phase, and the seconds of all so far. ``over`` takes the whole time of its block,
    whatever phases are entered inside."""

    def __init__(
        self, first: str, start: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._clock, self._name = clock, first
        self._since = clock() if start is None else start
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
        """The phase that is running."""
        return self._over[-1] if self._over else self._name

    def seconds(self) -> dict[str, float]:
        """Seconds per phase until now, in the order of their first time, without empty ones."""
        self._book()
        return {name: seconds for name, seconds in self._spent.items() if seconds}

    def _book(self, at: float | None = None) -> None:
        now = self._clock() if at is None else at
        self._spent[self.now()] += now - self._since
        self._since = now


class Training(msgspec.Struct, frozen=True):
    """The time from this start's first tree to its last update. learner: seconds of one rank by
    activity, which sum to ``seconds``. busy: shares by kind of process. without_trees: seconds in
    which no tree grew; loading: in which actors were given weights."""

    first: int
    last: int
    resumed: bool
    seconds: float
    learner: dict[str, float]
    busy: dict[str, float]
    without_trees: float
    loading: float

    def rows(self) -> dict[str, float]:
        """Return the seconds of the learner's and the actors' activities by name; they overlap."""
        rows = {f"learner: {name}": seconds for name, seconds in self.learner.items()}
        rows |= {f"{name}: busy": share * self.seconds for name, share in self.busy.items()}
        rows["actors: no tree may grow"] = self.without_trees
        rows["actors: new weights on their way"] = self.loading
        return rows


def learner_seconds(sums: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Seconds of one rank by activity, which sum to ``seconds``. sums: of ``LEARNER``'s metrics."""
    activities = {name: sums.get(metric, 0.0) for metric, name in LEARNER.items()}
    return activities | {"waiting for trees": max(0.0, seconds - sum(activities.values()))}


def table(phases: Mapping[str, float], training: Training) -> list[str]:
    """Lines of less than 80 characters: the phases, then the time inside the updates."""
    wall, updates = sum(phases.values()), training.last - training.first
    resumed = f" (resumed at version {training.first})" if training.resumed else ""
    parts = [(f"where the {wall:.1f} s of this start went{resumed}", phases, wall)]
    if updates:
        each = f"{training.seconds:.1f} s, {training.seconds / updates:.1f} s each"
        heading = f"{updates} update{'s' * (updates > 1)} in {each}; meanwhile, per process"
        parts.append((heading, training.rows(), training.seconds))
    lines = []
    for heading, rows, whole in parts:
        lines.append(f"  {heading}")
        for name, seconds in rows.items():
            lines.append(f"    {name:<34} {seconds:>8.1f} s {seconds / max(whole, 1e-9):>6.1%}")
    return lines
