"""The command coppice report: one page, or a picture, that shows one or several groups of runs."""

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import jinja2
import msgspec
import polars as pl
import polars.selectors as cs
from markupsafe import Markup
from matplotlib.figure import Figure

from coppice.common.options import command_parser
from coppice.scheduler.telemetry.exporter import declaration
from coppice.tools.inspecting import frames, runs, trace
from coppice.tools.inspecting.figures import caption, inline, panels, save
from coppice.tools.inspecting.runs import UNREADABLE, Curve, RunFolder

EXAMPLES = """\
  coppice report runs/slate-tiny-20261123-090049    report.html of one run
  coppice report A=slate B=slate C=slate D=grpo     three seeds against one run
  coppice report RUN --out curves.png --metric learner/kl --metric score/reward"""
SUFFIXES = (".html", ".png", ".svg")
Groups = Mapping[str, Sequence[RunFolder]]
TREES = 5000
"""The newest finished trees of a run that the statistics read; a longer run's journal may not fit
into memory."""

LINES = "A bold line is a running mean; below a figure are the means of its first and last tenth."
SEEDS = "Runs of one name are seeds: shown are their mean and its 95% interval by Student's t."
HELDOUT = "A single run's interval is over its held-out tasks, that of a group over its seeds."
CURVES = {
    "Learning": (
        "",
        "score/reward rollout/outcome learner/entropy learner/kl learner/surrogate"
        " learner/zero_advantage_share learner/trained_tokens learner/turns",
    ),
    "Reward components": (
        "Every score column of the judges and the environment, as the mean over an update's"
        " trained turns.",
        "score/*",
    ),
    "Staleness": (
        "Updates between the version that sampled a token and the one being trained on it."
        " share/staleness_1 is the share of the trained tokens that are one update old.",
        f"learner/staleness_* {runs.SHARE}staleness_*",
    ),
    "Numerics watch": (
        "Do engine and learner agree, and how far off-policy is the data?",
        "watch/engine_gap_p99 watch/sample_share learner/clip_share learner/mask_share"
        " watch/ratio_p99 watch/ratio_p01 learner/grad_norm",
    ),
    "Time": (
        "",
        "busy/engine busy/learner rate/decoded_tokens learner/seconds time/spread cache/hit_rate",
    ),
}
"""Section -> its words, and its metrics; a * stands for any text."""
OVERVIEW = ("score/reward", "learner/entropy", "watch/sample_share", "learner/staleness_mean")
"""The metrics of a picture, unless others are asked for."""


class ReportTable(msgspec.Struct, frozen=True):
    """The first cell of each row is its heading. folded: shown on request."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    folded: bool = False


class Drawn(msgspec.Struct, frozen=True):
    """A figure: its title, what it draws, and its description."""

    title: str
    figure: Figure
    caption: str

    @property
    def svg(self) -> Markup:
        # matplotlib escapes its texts
        return Markup(inline(self.figure, f"{self.title}: {self.caption}"))


class Section(msgspec.Struct):
    """A part of the page. words: paragraphs."""

    title: str
    words: list[str] = []
    figures: list[Drawn] = []
    tables: list[ReportTable] = []

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")


def sections(
    groups: Groups, against: str = "version", metrics: Sequence[str] = ()
) -> list[Section]:
    """Return the parts of the page. metrics: replace the curves of the section Learning."""
    chosen = {"Learning": ("", " ".join(metrics))} if metrics else {}
    parts = [_runs(groups), _heldout(groups)]
    for title, (words, patterns) in (CURVES | chosen).items():
        figures = _curves(groups, patterns.split(), against)
        parts.append(Section(title, [words] if words else [], figures))
    _add_causes(parts[-1], groups)
    parts += [_trees(groups), _config(groups), _environment(groups)]
    for section in parts:
        if not (section.figures or section.tables):
            section.words.append("No run has recorded any of this.")
    return parts


def picture(groups: Groups, against: str = "version", metrics: Sequence[str] = ()) -> Figure:
    """Return one figure with a panel for each metric, by default those of ``OVERVIEW``. Raises
    ValueError if there is nothing to draw."""
    drawn = {metric: _of_groups(groups, metric, against) for metric in metrics or OVERVIEW}
    if not any(one.x for curves in drawn.values() for one in curves.values()):
        nothing = "no update was made yet, so there is nothing to draw"
        raise ValueError(f"{', '.join(groups)}: {nothing}; --out FILE.html says what is there")
    return panels(drawn, "update" if against == "version" else "seconds")


def html(title: str, parts: Sequence[Section]) -> bytes:
    """Return the page. All texts are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("coppice.tools.inspecting", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(title=title, sections=parts)
    return page.encode(errors="backslashreplace")


def compared(
    caption: str, columns: Mapping[str, Mapping[str, str]], folded: bool = False
) -> list[ReportTable]:
    """Return a table with a column per run or group and a row per key that any of them has; none
    without columns."""
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [[key, *(column.get(key, "-") for column in columns.values())] for key in keys]
    return [ReportTable(caption, ["", *columns], rows, folded)] if columns else []


def _names(groups: Groups) -> dict[str, RunFolder]:
    """All runs by a heading: the name, with the folder where several have that name."""
    return {
        name if len(group) == 1 else f"{name}: {run.folder}": run
        for name, group in groups.items()
        for run in group
    }


# ----------------------------------------------------------------------------------------------
# curves and results


def _of_groups(groups: Groups, metric: str, against: str) -> dict[str, Curve]:
    return {name: runs.curve(group, metric, against) for name, group in groups.items()}


def _curves(groups: Groups, patterns: Sequence[str], against: str) -> list[Drawn]:
    """Return a figure for each recorded metric, with its meaning (docs/metrics.md)."""
    everyone = _names(groups).values()
    recorded = sorted(set().union(*(run.metrics() for run in everyone)))
    label, figures = "update" if against == "version" else "seconds", []
    for metric in (name for pattern in patterns for name in recorded if fnmatchcase(name, pattern)):
        _, meaning = declaration(metric) or ("", "")
        figures += _drawn(metric, _of_groups(groups, metric, against), label, meaning)
    return figures


def _drawn(title: str, curves: dict[str, Curve], label: str, meaning: str = "") -> list[Drawn]:
    """One figure, or none if there is no point."""
    if not any(one.x for one in curves.values()):
        return []
    words = f"{meaning}: {caption(curves)}" if meaning else caption(curves)
    return [Drawn(title, panels({title: curves}, label), words)]


def _runs(groups: Groups) -> Section:
    names, rows = _names(groups), []
    for name, run in names.items():
        seconds = f"{run.records[-1].get('time/run', 0):.0f}" if run.records else "-"
        seed = str(run.config.get("seed", "-"))
        rows.append([name, run.state, str(len(run.records)), seconds, seed, str(run.folder)])
    head = ["run", "state", "updates", "seconds", "seed", "folder"]
    words = [SEEDS] if any(len(group) > 1 for group in groups.values()) else []
    words += [f"{name}: {sentence}" for name, run in names.items() for sentence in run.missing]
    table = ReportTable("The runs of this report", head, rows)
    return Section("Runs", [*words, LINES], tables=[table])


def results(groups: Groups) -> ReportTable:
    """Return the held-out measures of each group at the first and the last evaluation."""
    rows = []
    for name, group in groups.items():
        for measure in runs.measures(group):
            c = runs.heldout(group, measure)
            points = list(zip(c.x, c.y, c.half, strict=True))
            cells = [f"{runs.shown((mean, half))} (version {v:.0f})" for v, mean, half in points]
            if len(points) > 1:
                rows.append([name, measure, cells[0], cells[-1], _verdict(points[0], points[-1])])
            elif points:
                rows.append([name, measure, *cells, "-", "-"])
    head = ["run", "measure", "first", "last", "change"]
    return ReportTable("Held-out measures with 95% intervals", head, rows)


def _verdict(first: tuple[float, float, float], last: tuple[float, float, float]) -> str:
    (_, before, half), (_, after, other) = first, last
    if abs(after - before) > half + other:
        return "rose beyond both intervals" if after > before else "fell beyond both intervals"
    return "within the intervals" if half == half and other == other else "no interval"


def _heldout(groups: Groups) -> Section:
    names, figures, words = _names(groups), [], [HELDOUT]
    for measure in runs.measures(list(names.values())):
        curves = {name: runs.heldout(group, measure) for name, group in groups.items()}
        figures += _drawn(measure, curves, "version")
    for name, run in names.items():
        if best := run.summary.get("best"):
            value = f"{best['measure']} is {best['value']:.3f}"
            words.append(f"{name}: the best {value}, of version {best['version']}.")
    table = results(groups)
    return Section("Held-out results", words, figures, [table] if table.rows else [])


def _add_causes(section: Section, groups: Groups) -> None:
    waits = {}
    for name, run in _names(groups).items():
        try:
            seconds = trace.shares(trace.recorded(run.folder, run.records))
        except UNREADABLE as error:
            section.words.append(f"{name}: no causes of the wall time, because {error}.")
            continue
        total = sum(seconds.values())
        shares = {cause: f"{s:.1f} s ({s / (total or 1.0):.1%})" for cause, s in seconds.items()}
        waits[name] = shares | {"sum": f"{total:.1f} s"}
    one_cause = "Who waited for whom: each moment of the newest start has one cause"
    section.tables = compared(one_cause, waits)


# ----------------------------------------------------------------------------------------------
# trees, settings and machine


def _trees(groups: Groups) -> Section:
    columns = {}
    for name, run in _names(groups).items():
        with (
            contextlib.suppress(*UNREADABLE),  # the section Runs has said so
            contextlib.closing(frames.opened(run.folder)) as journal,
        ):
            tally = sorted(journal.tally().items())
            columns[name] = {f"trees {status}": f"{count:,}" for status, count in tally}
            rows = journal.trees("split='train' AND status!='growing'")[-TREES:]
            below = frames.nodes(journal, rows)
            if not below.is_empty():
                columns[name] |= _statistics(frames.trees(journal, rows, below), below)
    return Section("Trees", tables=compared("Means over trees (docs/dump.md)", columns))


def _statistics(table: pl.DataFrame, below: pl.DataFrame) -> dict[str, str]:
    """Return the means of the columns of ``coppice trees`` over a run's trees, and how many
    episodes crashed, with the most frequent reason."""
    means = table.drop("tree", "version", "age_s", "trained_by").select(cs.numeric().mean())
    numbers = {
        f"mean {name}": f"{value:.4g}"
        for name, value in means.row(0, named=True).items()
        if value is not None and not name.endswith(("_min", "_max"))
    }
    crashes = below.filter(pl.col("fate").str.starts_with("crashed: "))["fate"]
    if not crashes.is_empty():
        reason, count = crashes.value_counts(sort=True).row(0)
        numbers["episodes that crashed and score 0"] = f"{len(crashes)}; {count} of them {reason}"
    return numbers


def _config(groups: Groups) -> Section:
    configs = {name: [run.config for run in group if run.config] for name, group in groups.items()}
    rows = runs.differences(configs)
    tables = [ReportTable("Keys whose values differ", ["key", *configs], rows)] if rows else []
    for name, run in _names(groups).items():
        settings = [list(row) for row in runs.flat(run.config).items()]
        tables.append(ReportTable(f"All settings of {name}", ["key", "value"], settings, True))
    return Section("Configuration", tables=tables)


def _environment(groups: Groups) -> Section:
    machines = {name: dict(run.environment) for name, run in _names(groups).items()}
    machines = {name: machine for name, machine in machines.items() if machine}
    packages = {name: machine.pop("packages", {}) for name, machine in machines.items()}
    texts = {name: {k: str(v) for k, v in one.items()} for name, one in machines.items()}
    tables = compared("Machine and code of the newest launch", texts)
    return Section(
        "Environment and versions", tables=tables + compared("Packages", packages, folded=True)
    )


# ----------------------------------------------------------------------------------------------
# the command


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice report."""
    parser = command_parser(
        "coppice report",
        "Show runs on one HTML page, or as a picture. The page needs no network and no\n"
        "other file. Runs may be live, stopped, failed or old.",
        EXAMPLES,
    )
    add, named = parser.add_argument, "run folders; those of one NAME are seeds of one group"
    add("runs", nargs="+", metavar="RUN[=NAME]", help=named)
    out, page = "FILE.html, .png or .svg (default: %(default)s)", Path("report.html")
    add("--out", type=Path, default=page, metavar="FILE", help=out)
    metric = "draw this metric of metrics.jsonl; repeatable"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    against = "curves against updates (default) or seconds"
    add("--against", choices=["version", "time/run"], default="version", help=against)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    command = parser()
    options = command.parse_args(arguments)
    out: Path = options.out
    if out.suffix not in SUFFIXES:
        command.error(f"--out {out}: expected a name that ends with {', '.join(SUFFIXES)}")
    try:
        given = [_named(text) for text in options.runs]
        runs.check_metrics(given, options.metric)
        groups = runs.grouped(given)
        if len({(run.name, run.folder.resolve()) for run in given}) < len(given):
            raise ValueError(
                "a run is given twice under one name: leave one out, or give it another name"
            )
        if out.suffix == ".html":
            parts = sections(groups, options.against, options.metric)
            out.write_bytes(html(f"Coppice report: {', '.join(groups)}", parts))
        else:
            save(picture(groups, options.against, options.metric), out)
    except (OSError, ValueError) as error:
        print(f"coppice report: {error}", file=sys.stderr)
        return 2
    print(f"report: {out}")
    return 0


def _named(text: str) -> RunFolder:
    """Read FOLDER or FOLDER=NAME; both may have a = in them. Raises ValueError."""
    folder, name = text, ""
    while not Path(folder).is_dir() and "=" in folder:
        folder, _, last = folder.rpartition("=")
        name = f"{last}={name}" if name else last
    return runs.read(Path(folder), name or None)
