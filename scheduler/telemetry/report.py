"""Where the seconds of a run go, and the summary at its end: the held-out start against the end
with intervals, and where the run's files are."""

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from coppice.scheduler.evaluation import best
from coppice.scheduler.evaluation.evaluation import HeldOut
from coppice.scheduler.growth import dynamic_sampling
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.alerts import conclude, say

SUMMARY = "summary.json"
"""This file of the run's folder says that the run has ended."""
FILES = "config.json journal.sqlite metrics.jsonl tensorboard checkpoints weights best logs".split()


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


def heldout_line(name: str, result: HeldOut, seconds: float) -> str:
    """One line for the terminal, with the headline first."""
    shown = ", ".join(f"{measure} {result.measures[measure]}" for measure in _ordered(result))
    what = f"held-out {name} (version {result.version}, {result.questions} tasks)"
    return f"{what}: {shown}, {seconds:.0f} s"


def _ordered(result: HeldOut) -> list[str]:
    return sorted(result.measures, key=lambda measure: (measure != result.headline, measure))


def write(
    run: Path,
    journal: Journal,
    counts: Counter[str],
    calls: Counter[str],
    spent: dict[str, float],
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
    (run / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    conclude("\nsummary")
    if "start" in evaluations and "end" in evaluations:
        start, end = (msgspec.convert(evaluations[name][1], HeldOut) for name in ("start", "end"))
        _compare(start, end)
    if kept is not None:
        value = f"version {kept[0].version}, {kept[0].value:.3f}"
        conclude(f"  best held-out {kept[0].measure}: {value} (coppice export --version best)")
    if equal := dynamic_sampling.summary(counts):
        conclude(f"  {equal}")
    look = f"coppice trees {shlex.quote(str(run))}"
    invalid, judged = counts["invalid_judgements"], max(1, counts["judged_scores"])
    warnings = [
        (
            counts["invalid_judgements"],
            f"of {judged} scores of the judge were invalid ({1 - invalid / judged:.3f} valid): see"
            f" {look}",
        ),
        (
            counts["outgrown_trajectories"],
            "trajectories outgrew actors.max_context and ended there as failures",
        ),
        (
            counts["refused_episodes"],
            "episodes have no outcome: their agents ended when a request was refused",
        ),
        (
            counts["crashed_episodes"],
            f"training episodes crashed and score 0: {look} --where 'crashed_max = 1' --all",
        ),
        (len(quarantined), f"tasks quarantined: see {SUMMARY}"),
    ]
    for count, warning in warnings:
        if count:
            say(f"  {count} {warning}")
    conclude(f"  where the {wall:.1f} s of this start went")
    for name, seconds in spent.items():
        conclude(f"    {name:<34} {seconds:>8.1f} s {seconds / max(wall, 1e-9):>6.1%}")
    for name in FILES:
        if (run / name).exists():
            conclude(f"  {name:<15} {run / name}")
    conclude(f"look at a tree: {look}")


def _compare(start: HeldOut, end: HeldOut) -> None:
    for measure in (name for name in _ordered(end) if name in start.measures):
        a, b = start.measures[measure], end.measures[measure]
        verdict = "rose beyond both 95% intervals" if b.low > a.high else "within the intervals"
        if b.high < a.low:
            verdict = "fell beyond both 95% intervals"
        conclude(f"  held-out {measure:<14} {a} -> {b}   {verdict}")
