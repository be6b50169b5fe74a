"""The command coppice report: one page, or a picture, that shows one or several groups of runs.

A page begins with the verdict on each run (``scheduler.telemetry.verdict``). Then come six plots:
the held-out headline, the first metric of each heavy statement, the heaviest first, their other
metrics, and the curves that moved most from first to last tenth, relative to the noise between
neighbours. Constant curves are left out. All else is folded.
"""

import argparse
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import jinja2
import msgspec
from markupsafe import Markup
from matplotlib.figure import Figure

from coppice.common.options import command_parser, gave_up
from coppice.scheduler.ledger.journal import REMOVED, Journal
from coppice.scheduler.telemetry import verdict
from coppice.scheduler.telemetry.exporter import declaration
from coppice.scheduler.telemetry.verdict import EQUAL_SHARE, HEAVY, Statement
from coppice.tools.inspecting import drawing, dump, frames, runs, trace
from coppice.tools.inspecting.figures import caption, inline, panels, save
from coppice.tools.inspecting.runs import UNREADABLE, Curve, RunFolder

EXAMPLES = """\
  coppice report runs/slate-tiny-20261123-090049    report.html of one run
  coppice report A=slate B=slate C=slate D=grpo     three seeds against one run
  coppice report RUN --out curves.png --metric learner/kl --metric score/reward"""
SUFFIXES = (".html", ".png", ".svg")
Groups = Mapping[str, Sequence[RunFolder]]
TREES = 5000
"""The newest finished trees of a run among which some are found that show a statement; a longer
run's journal may not fit into memory."""
PLOTS, SHOWN = 6, 3
"""The plots before the folds, and the trees that show a statement."""
HELDOUT = "heldout/"

LINES = "A bold line is a running mean; below a figure are the means of its first and last tenth."
SEEDS = "Runs of one name are seeds: shown are their mean and its 95% interval by Student's t."
INTERVALS = "A single run's interval is over its held-out tasks, that of a group over its seeds."
MADE = {EQUAL_SHARE: "new groups whose rewards are all equal"}
"""The meanings of metrics that no record has."""
CURVES = (
    f"score/reward rollout/outcome {EQUAL_SHARE} learner/entropy learner/kl learner/surrogate"
    " learner/zero_advantage_share learner/trained_tokens learner/turns score/*"
    f" learner/staleness_* {runs.SHARE}staleness_* watch/engine_gap_p99 watch/sample_share"
    " learner/clip_share learner/mask_share watch/ratio_p99 watch/ratio_p01 learner/grad_norm"
    " busy/engine busy/learner rate/decoded_tokens learner/seconds time/spread cache/hit_rate"
).split()
"""The metrics of a page; a * stands for any text."""
OVERVIEW = ("score/reward", "learner/entropy", "watch/sample_share", "learner/staleness_mean")
"""The metrics of a picture, unless others are asked for."""


class ReportTable(msgspec.Struct, frozen=True):
    """The first cell of each row is its heading."""

    caption: str
    head: list[str]
    rows: list[list[str]]


class Drawn(msgspec.Struct, frozen=True):
    title: str
    figure: Figure
    caption: str

    @property
    def svg(self) -> Markup:
        # matplotlib escapes its texts
        return Markup(inline(self.figure, f"{self.title}: {self.caption}"))


Showing = dict[str, str]
Texts = dict[str, tuple[str, str]]
"""Of trees, by their anchors on the page: the question, or a heading and the tree as text."""


class Section(msgspec.Struct):
    """A part of the page. words: paragraphs. verdicts: by run. trees: by anchor, question and text.
    folded: shown on request."""

    title: str
    words: list[str] = []
    figures: list[Drawn] = []
    tables: list[ReportTable] = []
    verdicts: dict[str, list[tuple[Statement, Showing]]] = {}
    trees: Texts = {}
    folded: bool = True


def sections(
    groups: Groups, against: str = "version", metrics: Sequence[str] = ()
) -> list[Section]:
    """Return the parts of the page. metrics: the first of the six plots."""
    first, trees = Section("Verdict", folded=False), Section("Trees that show it")
    for place, (name, run) in enumerate(_names(groups).items()):
        first.verdicts[name] = _judged(run, f"run-{place}", trees.trees)
        first.words += [f"{name}: {sentence}" for sentence in run.missing]
    told = [one for statements in first.verdicts.values() for one, _ in statements]
    six, others = chosen(groups, told, metrics)
    figures, more = ([_drawn(groups, name, against) for name in of] for of in (six, others))
    parts = [
        first,
        Section("What matters", figures=figures, folded=False),
        trees,
        Section("Held-out results", [INTERVALS], tables=results(groups)),
        Section("Other curves", [LINES, SEEDS], more),
        _causes(groups),
        _settings(groups),
    ]
    for section in parts:
        if not (section.figures or section.tables or section.verdicts or section.trees):
            section.words.append("No run has recorded any of this.")
    return parts


def picture(groups: Groups, against: str = "version", metrics: Sequence[str] = ()) -> Figure:
    """Return one figure with a panel for each metric, by default those of ``OVERVIEW``. Raises
    ValueError if there is nothing to draw."""
    drawn = {metric: _of_groups(groups, metric, against) for metric in metrics or OVERVIEW}
    if not any(one.x for curves in drawn.values() for one in curves.values()):
        nothing = "no update was made yet, so there is nothing to draw"
        raise ValueError(f"{', '.join(groups)}: {nothing}; --out FILE.html says what is there")
    label = "update" if against == "version" else "seconds"
    if label == "seconds" and any(metric.startswith(HELDOUT) for metric in drawn):
        label += " (held-out: update)"
    return panels(drawn, label)


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


def _names(groups: Groups) -> dict[str, RunFolder]:
    """All runs by a heading: the name, with the folder where several have that name."""
    return {
        name if len(group) == 1 else f"{name}: {run.folder}": run
        for name, group in groups.items()
        for run in group
    }


def _judged(run: RunFolder, anchor: str, texts: Texts) -> list[tuple[Statement, Showing]]:
    """Return the verdict on a run with the trees that show it, and add their texts to ``texts``."""
    facts = run.records, run.evaluations, run.config
    statements, showing = verdict.verdict(*facts, None), list[Showing]()
    try:
        with frames.opened(run.folder) as journal:
            statements = verdict.verdict(*facts, journal)
            showing = _showing(run.folder, journal, statements, anchor, texts)
    except UNREADABLE as error:
        run.missing.append(f"Its trees cannot be shown ({error}).")
    state = Statement("state", f"{run.state}; {len(run.records)} updates")
    told = [state, *statements, Statement("try", verdict.remedy(statements))]
    return list(zip(told, [{}, *showing, *({} for _ in told)], strict=False))


def _showing(
    run: Path, journal: Journal, statements: Sequence[Statement], anchor: str, texts: Texts
) -> list[Showing]:
    """Return for each statement the first trees that its command lists."""
    tables, showing = {}, list[Showing]()
    for statement in statements:
        showing.append({})
        given = ["--limit", str(SHOWN), *shlex.split(statement.trees)]
        options = dump.parser().parse_args([str(run), *given])
        if (split := "heldout" if options.heldout else "train") not in tables:
            rows = journal.trees("split=? AND status!='growing'", split)[-TREES:]
            below = frames.nodes(journal, rows)
            tables[split] = {row.id: row for row in rows}, frames.trees(journal, rows, below), below
        rows, table, below = tables[split]
        with contextlib.suppress(ValueError):  # the run lacks a column
            table = frames.groups(table, below) if options.groups else table
            table = dump.ordered(dump.filtered(table, below, options), options)
            for tree, question in table["tree", "question"].iter_rows() if statement.trees else ():
                showing[-1][f"{anchor}-{tree}"] = question
                text = drawing.as_text(journal, rows[tree], drawing.Detail(100))
                texts[f"{anchor}-{tree}"] = f"{question} (tree {tree})", text
    return showing


def chosen(
    groups: Groups, statements: Sequence[Statement], metrics: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the names of the six plots, and of the others. metrics: come first."""
    everyone = _names(groups).values()
    recorded = sorted(set().union(*(run.metrics() for run in everyone)))
    names = [f"{HELDOUT}{measure}" for measure in runs.measures(list(everyone))]
    names += [name for of in CURVES for name in recorded if fnmatchcase(name, of)]
    moved = dict[str, float]()
    for name in [*metrics, *names]:
        if curves := [one for one in _of_groups(groups, name, "version").values() if one.x]:
            moved[name] = max(map(_moved, curves))
    heavy = [one for one in statements if one.weight >= HEAVY or one.subject == "learned"]
    heavy.sort(key=lambda one: (one.subject != "learned", -one.weight))
    wanted = [
        name for of in (slice(1), slice(1, None)) for one in heavy for name in one.metrics[of]
    ]
    wanted = [*metrics, *wanted, *sorted(moved, key=lambda name: -moved[name])]
    six = [name for name in dict.fromkeys(wanted) if moved.get(name) or name in metrics][:PLOTS]
    return six, [name for name in moved if name not in six]


def _moved(curve: Curve) -> float:
    tenth = max(1, len(curve.y) // 10)
    noise = stdev([0.0, *(b - a for a, b in pairwise(curve.y)), 0.0])
    return abs(fmean(curve.y[-tenth:]) - fmean(curve.y[:tenth])) / noise if noise else 0.0


def _of_groups(groups: Groups, metric: str, against: str) -> dict[str, Curve]:
    """Return a metric, or a held-out measure by version, of each group."""
    if metric.startswith(HELDOUT):
        measure = metric.removeprefix(HELDOUT)
        return {name: runs.heldout(group, measure) for name, group in groups.items()}
    return {name: runs.curve(group, metric, against) for name, group in groups.items()}


def _drawn(groups: Groups, metric: str, against: str) -> Drawn:
    """Return a figure, with the metric's meaning (docs/metrics.md)."""
    curves = _of_groups(groups, metric, against)
    by_version = against == "version" or metric.startswith(HELDOUT)
    label = "update" if by_version else "seconds"
    _, meaning = declaration(metric) or ("", MADE.get(metric, ""))
    words = f"{meaning}: {caption(curves)}" if meaning else caption(curves)
    return Drawn(metric, panels({metric: curves}, label), words)


def results(groups: Groups) -> list[ReportTable]:
    """Return the held-out measures of each group at the first and the last evaluation."""
    rows = []
    for name, group in groups.items():
        for measure in runs.measures(group):
            c = runs.heldout(group, measure)
            points = list(zip(c.x, c.y, c.half, strict=True))
            cells = [f"{runs.shown((mean, half))} (version {v:.0f})" for v, mean, half in points]
            if len(points) > 1:
                by, half, said = verdict.change(points[0][1:], points[-1][1:])
                rows.append([name, measure, cells[0], cells[-1], f"{by:+.3f} ±{half:.3f}: {said}"])
            elif points:
                rows.append([name, measure, *cells, "-", "-"])
    head = ["run", "measure", "first", "last", "change"]
    return [ReportTable("Held-out measures with 95% intervals", head, rows)] if rows else []


def _causes(groups: Groups) -> Section:
    waits, section = {}, Section("Who waited for whom")
    for name, run in _names(groups).items():
        try:
            newest = trace.recorded(run.folder, run.records)
            seconds = trace.shares(newest)
        except UNREADABLE as error:
            section.words.append(f"{name}: no causes of the wall time, because {error}.")
            continue
        if newest.cut:
            section.words.append(f"{name}: its first calls were {REMOVED}.")
        total = sum(seconds.values())
        shares = {cause: f"{s:.1f} s ({s / (total or 1.0):.1%})" for cause, s in seconds.items()}
        waits[name] = shares | {"sum": f"{total:.1f} s"}
    causes = dict.fromkeys(cause for one in waits.values() for cause in one)
    rows = [[cause, *(one.get(cause, "-") for one in waits.values())] for cause in causes]
    caption = "Each moment of the newest start has one cause"
    section.tables = [ReportTable(caption, ["", *waits], rows)] if rows else []
    return section


def _settings(groups: Groups) -> Section:
    everything = {
        name: [run.config | {"environment": run.environment} for run in group if run.config]
        for name, group in groups.items()
    }
    rows = runs.differences(everything)
    tables = [ReportTable("What differs", ["key", *groups], rows)] if rows else []
    for name, of in everything.items():
        settings = [list(row) for row in runs.flat(of[0]).items()] if of else []
        title = f"Settings, machine and code of {name}"
        tables.append(ReportTable(title, ["key", "value"], settings))
    return Section("Settings and machine", tables=tables)


def parser() -> argparse.ArgumentParser:
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
        return gave_up("coppice report", error)
    print(f"report: {out}")
    return 0


def _named(text: str) -> RunFolder:
    """Read FOLDER or FOLDER=NAME; both may have a = in them. Raises ValueError."""
    folder, name = text, ""
    while not Path(folder).is_dir() and "=" in folder:
        folder, _, last = folder.rpartition("=")
        name = f"{last}={name}" if name else last
    return runs.read(Path(folder), name or None)
