"""The summary at the end of a run: the held-out start against the end with intervals, baselines,
and where the run's files are."""

import shlex
from collections import Counter
from pathlib import Path

import msgspec

from coppice.scheduler.evaluation import best
from coppice.scheduler.evaluation.evaluation import HeldOut
from coppice.scheduler.growth import crashes
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import nothing_learnt, phases
from coppice.scheduler.telemetry.terminal import conclude, say

SUMMARY = "summary.json"
"""This file of the run's folder says that the run has ended."""


def heldout_line(name: str, result: HeldOut, seconds: float) -> str:
    """One line for the terminal, with the headline first."""
    names = sorted(result.measures, key=lambda measure: (measure != result.headline, measure))
    shown = ", ".join(f"{measure} {result.measures[measure]}" for measure in names)
    return f"held-out {name} (version {result.version}, {result.questions} tasks): {shown}, {seconds:.0f} s"


def write(
    run: Path,
    journal: Journal,
    baselines: dict[str, float],
    counts: Counter[str],
    calls: Counter[str],
    spent: dict[str, float],
    training: phases.Training,
) -> None:
    """Write RUN/summary.json and print the closing lines. spent: seconds per phase of this start of
    the run."""
    evaluations = {name: (version, result) for version, name, result in journal.evaluations()}
    summary = {
        "baselines": baselines,
        "heldout": {
            name: {"version": version, **result} for name, (version, result) in evaluations.items()
        },
        "counts": dict(counts),
        "calls": dict(calls),
        "quarantined": journal.quarantined(),
        "seconds": {
            "this_start": sum(spent.values()),
            "phases": spent,
            "training": msgspec.to_builtins(training),
        },
    }
    kept = best.read(run)
    if kept is not None:
        summary["best"] = msgspec.to_builtins(kept[0])
    (run / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    conclude("\nsummary")
    if "start" in evaluations and "end" in evaluations:
        start, end = (msgspec.convert(evaluations[name][1], HeldOut) for name in ("start", "end"))
        both = [measure for measure in start.measures if measure in end.measures]
        for measure in sorted(both, key=lambda measure: (measure != end.headline, measure)):
            a, b = start.measures[measure], end.measures[measure]
            verdict = "rose beyond both 95% intervals" if b.low > a.high else "within the intervals"
            if b.high < a.low:
                verdict = "fell beyond both 95% intervals"
            conclude(f"  held-out {measure:<14} {a} -> {b}   {verdict}")
        for name, value in baselines.items():
            conclude(f"  baseline {name:<22} {value:.3f} {end.headline}")
        if start.headline in start.measures:  # not if every held-out task was quarantined
            conclude(
                f"  baseline start of the run       {start.measures[start.headline].mean:.3f} {start.headline}"
            )
    if kept is not None:
        conclude(
            f"  best held-out {kept[0].measure}: version {kept[0].version}, {kept[0].value:.3f} (coppice export --version best)"
        )
    if spread := nothing_learnt.summary(counts):
        conclude(f"  {spread}")
    judged, invalid = counts["judged_scores"], counts["invalid_judgements"]
    if judged and invalid:
        say(
            f"  {invalid} of {judged} scores of the judge were invalid ({1 - invalid / judged:.3f} valid): see coppice trees {shlex.quote(str(run))}"
        )
    if counts["outgrown_trajectories"]:
        say(
            f"  {counts['outgrown_trajectories']} trajectories outgrew actors.max_context and ended there as failures"
        )
    if counts["refused_episodes"]:
        say(
            f"  {counts['refused_episodes']} episodes have no outcome: their agents ended when a request was refused"
        )
    if counts["crashed_episodes"]:
        say(
            f"  {counts['crashed_episodes']} training episodes crashed and score 0: {crashes.remedy(run)}"
        )
    if summary["quarantined"]:
        say(f"  {len(summary['quarantined'])} tasks quarantined: see {SUMMARY}")
    conclude("\n".join(phases.table(spent, training)))
    files = (
        "config.json",
        "journal.sqlite",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "weights",
        "best",
        "logs",
    )
    for name in files:
        if (run / name).exists():
            conclude(f"  {name:<15} {run / name}")
    conclude(f"look at a tree: coppice trees {shlex.quote(str(run))}")
