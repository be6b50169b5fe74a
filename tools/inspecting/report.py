"""The command tools/report: it shows the metrics of one or several runs as plots and a table."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from tools.inspecting.figures import save

PANELS = {
    "score/reward": "reward of the rollouts",
    "learner/entropy": "entropy (nats)",
    "watch/sample_share": "effective sample share",
    "learner/staleness_mean": "staleness (updates)",
}
"""The metric and the title of each plot, unless --metric names other metrics."""

MEASURES = ("em", "f1", "success", "completion", "return", "return_first", "return_second", "oracle", "valid")
"""Measures of held-out evaluations that the table shows if a run has them."""


class Run(msgspec.Struct, frozen=True):
    """The records of a run, one per update in order, and its summary (empty until the run has ended)."""

    name: str
    records: list[dict[str, float]]
    summary: dict[str, Any]


def read(folder: Path, name: str | None = None) -> Run:
    """Read a run from its folder. Raises ValueError if the run has made no update."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} is no run folder: it holds no metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    by_version = {record["version"]: record for record in lines if "learner/seconds" in record}
    if not by_version:
        raise ValueError(f"{folder} has made no update yet")
    file = folder / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {}
    return Run(name or folder.name, [by_version[v] for v in sorted(by_version)], summary)


def draw(runs: list[Run], panels: dict[str, str], against: str = "version") -> Figure:
    """Draw one panel per metric and one line per run, against updates ("version") or seconds ("time/run")."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (metric, title) in zip(axes, panels.items(), strict=False):
        for run in runs:
            points = [(r[against], r[metric]) for r in run.records if metric in r]
            axis.plot([x for x, _ in points], [y for _, y in points], marker=".", label=run.name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update" if against == "version" else "seconds", fontsize=9)
        axis.grid(alpha=0.3)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    figure.axes[0].legend(fontsize=8)
    return figure


def table(runs: list[Run]) -> str:
    """Return the held-out results at start and end (mean and 95% interval) as Markdown. Runs without a summary are left out."""
    ended = [run for run in runs if {"start", "end"} <= set(run.summary.get("heldout", {}))]
    names = [name for name in MEASURES if any(name in run.summary["heldout"]["end"]["measures"] for run in ended)]
    lines = ["| run | updates | seconds | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for run in ended:
        start, end = (run.summary["heldout"][when]["measures"] for when in ("start", "end"))
        cells = [f"{_shown(start[name])} -> {_shown(end[name])}" if name in end else "-" for name in names]
        last = run.records[-1]
        lines.append(f"| {run.name} | {len(run.records)} | {last['time/run']:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ±{value['half']:.3f}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="tools/report", description="Plots and a table of one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN[=NAME]", help="run folders, each with a name for the legend")
    parser.add_argument("--out", type=Path, default=Path("report.svg"), help="plot to write (SVG; default %(default)s)")
    parser.add_argument("--metric", action="append", metavar="NAME", help="metric of metrics.jsonl to plot; repeatable")
    parser.add_argument("--against", choices=["version", "time/run"], default="version")
    options = parser.parse_args(arguments)
    try:
        runs = [read(Path(folder), name or None) for folder, _, name in (r.partition("=") for r in options.runs)]
        known = sorted({key for run in runs for record in run.records for key in record})
        missing = [metric for metric in options.metric or [] if metric not in known]
        if missing:
            raise ValueError(f"no run has {missing}; there are {known}")
        panels = {metric: metric for metric in options.metric} if options.metric else PANELS
        save(draw(runs, panels, options.against), options.out)
    except (OSError, ValueError) as error:
        print(f"tools/report: {error}", file=sys.stderr)
        return 2
    print(table(runs))
    print(f"plot: {options.out}")
    return 0
