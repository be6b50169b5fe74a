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
from coppice.scheduler.telemetry.alerts import crash_remedy
from coppice.scheduler.telemetry.terminal import conclude, say

SUMMARY = "summary.json"
"""This file of the run's folder says that the run has ended."""
FILES = "config.json journal.sqlite metrics.jsonl tensorboard checkpoints weights best logs".split()


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
    """Write RUN/summary.json and print the closing lines. spent: seconds per phase."""
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
        _compare(start, end, baselines)
    if kept is not None:
        conclude(
            f"  best held-out {kept[0].measure}: version {kept[0].version}, {kept[0].value:.3f} (coppice export --version best)"
        )
    if equal := dynamic_sampling.summary(counts):
        conclude(f"  {equal}")
    judged, invalid = counts["judged_scores"], counts["invalid_judgements"]
    quarantined, run_name = summary["quarantined"], shlex.quote(str(run))
    warnings = (
        (invalid, f"{invalid} of {judged} scores of the judge were invalid ({1 - invalid / max(1, judged):.3f} valid): see coppice trees {run_name}"),
        (outgrown := counts["outgrown_trajectories"], f"{outgrown} trajectories outgrew actors.max_context and ended there as failures"),
        (refused := counts["refused_episodes"], f"{refused} episodes have no outcome: their agents ended when a request was refused"),
        (crashed := counts["crashed_episodes"], f"{crashed} training episodes crashed and score 0: {crash_remedy(run)}"),
        (len(quarantined), f"{len(quarantined)} tasks quarantined: see {SUMMARY}"),
    )  # fmt: skip
    for count, warning in warnings:
        if count:
            say(f"  {warning}")
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
    for name, value in baselines.items():
        conclude(f"  baseline {name:<22} {value:.3f} {end.headline}")
    if start.headline in start.measures:  # not if every held-out task was quarantined
        mean = start.measures[start.headline].mean
        conclude(f"  baseline start of the run       {mean:.3f} {start.headline}")
