"""The sections of a report: curves, tables and trees of one or several groups of runs, as values
that a template or a terminal shows."""

import contextlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import jinja2
import msgspec
import polars as pl
import polars.selectors as cs
from markupsafe import Markup
from matplotlib.figure import Figure

from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.telemetry.exporter import declaration
from coppice.scheduler.telemetry.phases import Training
from coppice.tools.inspecting import drawing, frames, runs, trace
from coppice.tools.inspecting.figures import caption, inline, panels
from coppice.tools.inspecting.runs import UNREADABLE, Curve, RunFolder

Groups = Mapping[str, Sequence[RunFolder]]
TREES = 5000
"""The newest finished trees of a run that the statistics and the choice of rollouts read; a longer
run's journal may not fit into memory."""
ROLLOUTS = 3
"""Trees shown per kind: best, worst, most surprising."""
CHARACTERS = 40_000
"""The longest text of one tree."""

LINES = "A bold line is a running mean; below a figure are the means of its first and last tenth."
SEEDS = "Runs of one name are seeds: shown are their mean and its 95% interval by Student's t."
ROLLOUT = (
    "Of each group's first run, the best and the worst trees are by outcome, else reward; the most"
    " surprising by advantage, else reward. An action that was continued has a *."
)
CURVES = {
    "Learning": (
        "",
        "score/reward rollout/outcome learner/entropy learner/kl learner/surrogate"
        " learner/zero_advantage_share learner/trained_tokens learner/turns",
    ),
    "Reward components": (
        "Every score column of the judges and the environment, as the mean over an update's"
        " trained turns. Groups whose rewards are all equal teach nothing: equal/1 is their share"
        " of the groups of step 1.",
        f"score/* {runs.EQUAL_SHARE}*",
    ),
    "Staleness": (
        "Updates between the version that sampled a token and the one being trained on it."
        " share/staleness_1 is the share of the trained tokens that are one update old.",
        f"learner/staleness_* {runs.SHARE}staleness_*",
    ),
    "Numerics watch": (
        "Do engine and learner agree, and how far off-policy is the data? A dotted line is where"
        " the run warns.",
        "watch/engine_gap_p99 watch/sample_share learner/clip_share learner/mask_share"
        " watch/ratio_p99 watch/ratio_p01 learner/grad_norm",
    ),
    "Time": (
        "",
        "busy/engine busy/learner rate/decoded_tokens learner/seconds time/spread cache/hit_rate",
    ),
}
"""Section -> its words, and its metrics; a * stands for any text."""
LIMITS = ("engine_gap", "sample_share", "clip_share", "mask_share", "entropy", "kl")
"""Keys of [learner.watch] that are values of a metric, at which a run warns."""
OVERVIEW = ("score/reward", "learner/entropy", "watch/sample_share", "learner/staleness_mean")
"""The metrics of a picture, unless others are asked for."""


class ReportTable(msgspec.Struct, frozen=True):
    """The first cell of each row is its heading. folded: shown on request."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    folded: bool = False

    def markdown(self) -> str:
        """Return the table for the terminal and for notes."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    """A part of the page. words: paragraphs. texts: headings with preformatted texts."""

    title: str
    words: list[str] = []
    figures: list[Drawn] = []
    tables: list[ReportTable] = []
    texts: list[tuple[str, str]] = []

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
    _add_times(parts[-1], groups)
    parts += [_trees(groups), _config(groups), _environment(groups)]
    for section in parts:
        if not (section.figures or section.tables or section.texts):
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
# figures


def _of_groups(groups: Groups, metric: str, against: str) -> dict[str, Curve]:
    return {name: runs.curve(group, metric, against) for name, group in groups.items()}


def _curves(groups: Groups, patterns: Sequence[str], against: str) -> list[Drawn]:
    """Return a figure for each recorded metric, with its meaning (docs/metrics.md)."""
    everyone = list(_names(groups).values())
    recorded = sorted(set().union(*(run.metrics() for run in everyone)))
    watches = [run.config.get("learner", {}).get("watch", {}) for run in everyone]
    same = all(watch == watches[0] for watch in watches)
    warns = {key: watches[0].get(key) for key in LIMITS if same}
    label, figures = "update" if against == "version" else "seconds", []
    for pattern in patterns:
        for metric in (name for name in recorded if fnmatchcase(name, pattern)):
            _, meaning = declaration(metric) or ("", "")
            limit = warns.get(metric.partition("/")[2].removesuffix("_p99"))
            curves = _of_groups(groups, metric, against)
            figures += _drawn(metric, curves, label, limit, meaning)
    return figures


def _drawn(
    title: str, curves: dict[str, Curve], label: str, limit: float | None = None, meaning: str = ""
) -> list[Drawn]:
    """One figure, or none if there is no point."""
    if not any(one.x for one in curves.values()):
        return []
    limits = {title: limit} if limit else {}
    words = f"{meaning}: {caption(curves)}" if meaning else caption(curves)
    return [Drawn(title, panels({title: curves}, label, limits), words)]


# ----------------------------------------------------------------------------------------------
# runs and their results


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
    names, figures = _names(groups), []
    for measure in runs.measures(list(names.values())):
        curves = {name: runs.heldout(group, measure) for name, group in groups.items()}
        figures += _drawn(measure, curves, "version")
    words = ["A single run's interval is over its held-out tasks, that of a group over its seeds."]
    for name, run in names.items():
        if baselines := run.summary.get("baselines"):
            values = ", ".join(f"{key} {value:.3f}" for key, value in baselines.items())
            words.append(f"{name}, without a model: {values}")
        if best := run.summary.get("best"):
            value = f"{best['measure']} is {best['value']:.3f}"
            words.append(f"{name}: the best {value}, of version {best['version']}.")
    table = results(groups)
    return Section("Held-out results", words, figures, [table] if table.rows else [])


def _add_times(section: Section, groups: Groups) -> None:
    waits, phases, training = {}, {}, {}
    for name, run in _names(groups).items():
        try:
            waits[name] = _spent(trace.budget(run.folder, run.records))
        except UNREADABLE as error:
            section.words.append(f"{name}: no causes of the wall time, because {error}.")
        seconds = run.summary.get("seconds", {})
        if "phases" in seconds:
            phases[name] = _spent(seconds["phases"])
        if spent := seconds.get("training"):
            training[name] = _spent(msgspec.convert(spent, Training).rows(), spent["seconds"])
    one_cause = "Who waited for whom: each moment of the newest start has one cause"
    overlap = "Seconds per process from the first tree to the last update; these overlap"
    section.tables = compared(one_cause, waits) + compared("Phases of the newest start", phases)
    section.tables += compared(overlap, training)


def _spent(seconds: Mapping[str, float], whole: float | None = None) -> dict[str, str]:
    total = whole or sum(seconds.values()) or 1.0
    rows = {name: f"{value:.1f} s ({value / total:.1%})" for name, value in seconds.items()}
    return rows if whole else rows | {"sum": f"{total:.1f} s"}


# ----------------------------------------------------------------------------------------------
# trees


def _trees(groups: Groups) -> Section:
    section = Section("Trees and rollouts", [ROLLOUT])
    columns, first = {}, {id(group[0]) for group in groups.values()}
    for name, run in _names(groups).items():
        with (
            contextlib.suppress(*UNREADABLE),  # the section Runs has said so
            contextlib.closing(frames.opened(run.folder)) as journal,
        ):
            tally = sorted(journal.tally().items())
            columns[name] = {f"trees {status}": f"{count:,}" for status, count in tally}
            rows = journal.trees("split='train' AND status!='growing'")[-TREES:]
            below = frames.nodes(journal, rows)
            table = frames.trees(journal, rows, below)
            if not below.is_empty():
                columns[name] |= _statistics(table, below)
                if id(run) in first:
                    texts = _remarkable(journal, rows, table, name)
                    no_scores = f"{name}: its trees have no scores, so none is the best or worst."
                    section.words += [] if texts else [no_scores]
                    section.texts += texts
    section.tables = compared("Tree statistics (docs/dump.md names the columns)", columns)
    return section


def _remarkable(
    journal: Journal, rows: Sequence[TreeRow], table: pl.DataFrame, name: str
) -> list[tuple[str, str]]:
    """Return headings and texts of the best, the worst and the most surprising trees; among equals,
    of the newest."""
    texts, by_id = [], {row.id: row for row in rows}
    for rank in frames.RANKS:
        with contextlib.suppress(ValueError):  # the run has none of the rank's columns
            for tree in frames.ranked(table.reverse(), rank).head(ROLLOUTS).iter_rows(named=True):
                number = tree["tree"]
                text = drawing.as_text(journal, by_id[number], drawing.Detail(110, full=True))
                if len(text) > CHARACTERS:
                    more = f"... (coppice trees RUN --tree {number} --full prints the rest)"
                    text = f"{text[:CHARACTERS]}\n{more}"
                words = "most surprising" if rank == "surprising" else rank
                about = ("outcome", "reward", "step_reward", "spread")
                values = [f"{c} {tree[c]:+.2f}" for c in about if tree.get(c) is not None]
                head = f"{name}, {words}: tree {number}, task {tree['task']}"
                texts.append((f"{head}, version {tree['version']} ({', '.join(values)})", text))
    return texts


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


# ----------------------------------------------------------------------------------------------
# settings and machine


def _config(groups: Groups) -> Section:
    configs = {name: [run.config for run in group if run.config] for name, group in groups.items()}
    rows = runs.differences(configs)
    tables = [ReportTable("Keys whose values differ", ["key", *configs], rows)] if rows else []
    for name, run in _names(groups).items():
        settings = [list(row) for row in runs.flat(run.config).items()]
        tables.append(ReportTable(f"All settings of {name}", ["key", "value"], settings, True))
    words = [] if rows or len(configs) == 1 else [f"The same in {', '.join(configs)}."]
    return Section("Configuration", words, tables=tables)


def _environment(groups: Groups) -> Section:
    machines = {name: dict(run.environment) for name, run in _names(groups).items()}
    machines = {name: machine for name, machine in machines.items() if machine}
    packages = {name: machine.pop("packages", {}) for name, machine in machines.items()}
    texts = {name: {k: str(v) for k, v in one.items()} for name, one in machines.items()}
    tables = compared("Machine and code of the newest launch", texts)
    tables += compared("Packages", packages, folded=True)
    other = [row[0] for row in runs.differences({name: [one] for name, one in packages.items()})]
    words = [f"Packages of different versions: {', '.join(other)}."] if other else []
    return Section("Environment and versions", words, tables=tables)
