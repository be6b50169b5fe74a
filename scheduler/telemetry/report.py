"""The summary at the end of a run, whose lines are the verdict."""

import contextlib
import shlex
from collections import Counter
from pathlib import Path

import msgspec

from coppice.common import shards
from coppice.common.atomic import as_json
from coppice.scheduler.evaluation import best
from coppice.scheduler.evaluation.evaluation import HeldOut
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Reader
from coppice.scheduler.telemetry import verdict
from coppice.scheduler.telemetry.alerts import conclude

SUMMARY = "summary.json"
"""This file of the run's folder says that the run has ended."""


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
    heldout = {name: {"version": v, **result} for v, name, result in journal.evaluations()}
    quarantined, kept, wall = journal.quarantined(), best.read(run), sum(spent.values())
    summary = {
        "heldout": heldout,
        "counts": dict(counts),
        "calls": dict(calls),
        "quarantined": quarantined,
        "seconds": {"this_start": wall, "phases": spent},
    }
    summary |= {} if kept is None else {"best": kept[0]}
    (run / SUMMARY).write_bytes(as_json(summary))
    config = run / "config.json"
    if config.exists():  # the folder is the run's, so this is the first of its schedulers
        # a run that was resumed for more updates has an "end" of each start
        results = {version: {**r, "version": version} for version, _, r in journal.evaluations()}
        settings = msgspec.json.decode(config.read_bytes())
        first, others = shards.journals(run)
        joined = contextlib.nullcontext(journal)
        if others:
            joined = Journal(first, readonly=True, others=others)
        with joined as whole:
            told = verdict.verdict(Reader(run).read(), [*results.values()], settings, whole)
        conclude("\n".join(verdict.lines(told, shlex.quote(str(run)))))
