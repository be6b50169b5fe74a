"""Where the seconds of a run go, and the summary at its end, whose lines are the verdict."""

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from coppice.common.atomic import as_json
from coppice.scheduler.evaluation import best
from coppice.scheduler.evaluation.evaluation import HeldOut
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Reader
from coppice.scheduler.telemetry import verdict
from coppice.scheduler.telemetry.alerts import conclude

SUMMARY = "summary.json"
"""This file of the run's folder says that the run has ended."""


class Phases:
    """The running phase, and the seconds of all so far. Invariant: every moment belongs to one
    phase. ``over`` takes the whole time of its block, whatever phases are entered inside."""

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
        return self._over[-1] if self._over else self._name

    def seconds(self) -> dict[str, float]:
        """Seconds per phase until now, in the order of their first time, without empty ones."""
        self._book()
        return {name: seconds for name, seconds in self._spent.items() if seconds}

    def _book(self, at: float | None = None) -> None:
        now = self._clock() if at is None else at
        self._spent[self.now()] += now - self._since
        self._since = now


def heldout_line(name: str, result: HeldOut, seconds: float) -> str:
    """One line for the terminal, with the headline first."""
    ordered = sorted(result.measures, key=lambda measure: (measure != result.headline, measure))
    shown = ", ".join(f"{measure} {result.measures[measure]}" for measure in ordered)
    what = f"held-out {name} (version {result.version}, {result.questions} tasks)"
    return f"{what}: {shown}, {seconds:.0f} s"


def write(
    run: Path, journal: Journal, counts: Counter[str], calls: Counter[str], spent: dict[str, float]
) -> None:
    """Write RUN/summary.json and print the closing lines. spent: seconds per phase."""
    evaluations = {name: (version, result) for version, name, result in journal.evaluations()}
    quarantined, kept, wall = journal.quarantined(), best.read(run), sum(spent.values())
    summary = {
        "heldout": {
            name: {"version": version, **result} for name, (version, result) in evaluations.items()
        },
        "counts": dict(counts),
        "calls": dict(calls),
        "quarantined": quarantined,
        "seconds": {"this_start": wall, "phases": spent},
    }
    summary |= {} if kept is None else {"best": kept[0]}
    (run / SUMMARY).write_bytes(as_json(summary))
    config = run / "config.json"
    if config.exists():  # the folder is the run's, so this is the first of its schedulers
        results = [{**result, "version": version} for version, result in evaluations.values()]
        settings = msgspec.json.decode(config.read_bytes())
        told = verdict.verdict(Reader(run).read(), results, settings, journal)
        conclude("\n".join(verdict.lines(told, shlex.quote(str(run)))))
