"""What a run says at its end: held-out start against end with intervals, baselines beside them, where everything lies."""

from collections import Counter
from pathlib import Path

import msgspec

from scheduler import best, phases
from scheduler.evaluation import HeldOut
from scheduler.journal import Journal
from scheduler.terminal import folded


def heldout_line(name: str, found: HeldOut, seconds: float) -> str:
    """One line for the terminal, the headline first."""
    names = sorted(found.measures, key=lambda measure: (measure != found.headline, measure))
    shown = ", ".join(f"{measure} {found.measures[measure]}" for measure in names)
    return folded(f"held-out {name} (version {found.version}, {found.questions} tasks): {shown}, {seconds:.0f} s")


def write(
    run: Path,
    journal: Journal,
    baselines: dict[str, float],
    counts: Counter[str],
    calls: Counter[str],
    spent: dict[str, float],
    training: phases.Training,
) -> None:
    """RUN/summary.json and the closing lines. spent: seconds of this start of the run by phase."""
    found = {name: (version, result) for version, name, result in journal.evaluations()}
    summary = {
        "baselines": baselines,
        "heldout": {name: {"version": version, **result} for name, (version, result) in found.items()},
        "counts": dict(counts),
        "calls": dict(calls),
        "quarantined": journal.quarantined(),
        "seconds": {"this_start": sum(spent.values()), "phases": spent, "training": msgspec.to_builtins(training)},
    }
    kept = best.read(run)
    if kept is not None:
        summary["best"] = msgspec.to_builtins(kept[0])
    (run / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
    print("\nsummary")
    if "start" in found and "end" in found:
        start, end = (msgspec.convert(found[name][1], HeldOut) for name in ("start", "end"))
        both = [measure for measure in start.measures if measure in end.measures]
        for measure in sorted(both, key=lambda measure: (measure != end.headline, measure)):
            a, b = start.measures[measure], end.measures[measure]
            verdict = "rose beyond both 95% intervals" if b.low > a.high else "within the intervals"
            if b.high < a.low:
                verdict = "fell beyond both 95% intervals"
            print(f"  held-out {measure:<14} {a} -> {b}   {verdict}")
        for name, value in baselines.items():
            print(f"  baseline {name:<22} {value:.3f} {end.headline}")
        print(f"  baseline start of the run       {start.measures[start.headline].mean:.3f} {start.headline}")
    if kept is not None:
        print(
            f"  best held-out {kept[0].measure}: version {kept[0].version}, {kept[0].value:.3f} (tools/export --version best)"
        )
    given, invalid = counts["judged_scores"], counts["invalid_judgements"]
    if given and invalid:
        print(
            f"  {invalid} of {given} scores of the judge were invalid ({1 - invalid / given:.3f} valid): see tools/dump {run}"
        )
    if summary["quarantined"]:
        print(f"  {len(summary['quarantined'])} tasks quarantined: see summary.json")
    print("\n".join(phases.table(spent, training)))
    for name in (
        "config.json",
        "journal.sqlite",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "weights",
        "best",
        "logs",
    ):
        if (run / name).exists():
            print(f"  {name:<15} {run / name}")
    print(f"look at a tree: tools/dump {run}", flush=True)
