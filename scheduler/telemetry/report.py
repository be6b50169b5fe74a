"""The summary at the end of a run: the held-out start against the end with intervals, baselines,
and where the run's files are."""

import shlex
from collections import Counter
from pathlib import Path

import msgspec

from coppice.scheduler.evaluation import best
from coppice.scheduler.evaluation.evaluation import HeldOut
from coppice.scheduler.growth import dynamic_sampling
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import phases
from coppice.scheduler.telemetry.terminal import conclude, say

SUMMARY = "summary.json"
"""This file of the run's folder says that the run has ended."""
FILES = "config.json journal.sqlite metrics.jsonl tensorboard checkpoints weights best logs".split()


def heldout_line(name: str, result: HeldOut, seconds: float) -> str:
    """One line for the terminal, with the headline first."""
    names = sorted(result.measures, key=lambda measure: (measure != result.headline, measure))
    shown = ", ".join(f"{measure} {result.measures[measure]}" for measure in names)
    what = f"held-out {name} (version {result.version}, {result.questions} tasks)"
    return f"{what}: {shown}, {seconds:.0f} s"


def write(
    run: Path,
    journal: Journal,
    baselines: dict[str, float],
    counts: Counter[str],
    calls: Counter[str],
    spent: dict[str, float],
    training: phases.Training,
) -> None:
    """Write RUN/summary.json and print the closing lines. spent: seconds per phase."""
    evaluations = {name: (version, result) for version, name, result in journal.evaluations()}
    quarantined, run_name = journal.quarantined(), shlex.quote(str(run))
    seconds = {"this_start": sum(spent.values()), "phases": spent, "training": training}
    summary = {
        "baselines": baselines,
        "heldout": {
            name: {"version": version, **result} for name, (version, result) in evaluations.items()
        },
        "counts": dict(counts),
        "calls": dict(calls),
        "quarantined": quarantined,
        "seconds": seconds,
    }
    kept = best.read(run)
    if kept is not None:
        summary["best"] = kept[0]
    (run / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    conclude("\nsummary")
    if "start" in evaluations and "end" in evaluations:
        start, end = (msgspec.convert(evaluations[name][1], HeldOut) for name in ("start", "end"))
        _compare(start, end, baselines)
    if kept is not None:
        value = f"version {kept[0].version}, {kept[0].value:.3f}"
        conclude(f"  best held-out {kept[0].measure}: {value} (coppice export --version best)")
    if equal := dynamic_sampling.summary(counts):
        conclude(f"  {equal}")
    invalid, judged = counts["invalid_judgements"], max(1, counts["judged_scores"])
    valid = f"{1 - invalid / judged:.3f} valid"
    crashed = f"coppice trees {run_name} --where 'crashed_max = 1' --all"
    for count, warning in (
        (
            invalid,
            f"of {judged} scores of the judge were invalid ({valid}): see coppice trees {run_name}",
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
            f"training episodes crashed and score 0: {crashed}",
        ),
        (len(quarantined), f"tasks quarantined: see {SUMMARY}"),
    ):
        if count:
            say(f"  {count} {warning}")
    conclude("\n".join(phases.table(spent, training)))
    for name in FILES:
        if (run / name).exists():
            conclude(f"  {name:<15} {run / name}")
    conclude(f"look at a tree: coppice trees {run_name}")


def _compare(start: HeldOut, end: HeldOut, baselines: dict[str, float]) -> None:
    both = [measure for measure in start.measures if measure in end.measures]
    for measure in sorted(both, key=lambda measure: (measure != end.headline, measure)):
        a, b = start.measures[measure], end.measures[measure]
        verdict = "rose beyond both 95% intervals" if b.low > a.high else "within the intervals"
        if b.high < a.low:
            verdict = "fell beyond both 95% intervals"
        conclude(f"  held-out {measure:<14} {a} -> {b}   {verdict}")
    if start.headline in start.measures:  # not if every held-out task was quarantined
        baselines = {**baselines, "start of the run": start.measures[start.headline].mean}
    for name, value in baselines.items():
        conclude(f"  baseline {name:<22} {value:.3f} {end.headline}")
