"""The sections of a report: curves, tables and trees of one or several groups of runs, as values
that a template or a terminal shows."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec
import polars as pl
from markupsafe import Markup
from matplotlib.figure import Figure

from coppice.common.atomic import as_json
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.telemetry.phases import Training
from coppice.tools.bootstrap import ROOT
from coppice.tools.inspecting import critical, drawing, frames
from coppice.tools.inspecting.figures import caption, inline, panels
from coppice.tools.inspecting.runs import (
    EQUAL_SHARE,
    SHARE,
    UNREADABLE,
    Curve,
    Run,
    curve,
    differences,
    flat,
    heldout,
    measures,
    shown,
)
from coppice.tools.launching.config import ConfigError, load

Groups = Mapping[str, Sequence[Run]]
TREES = 5000
"""The newest finished trees of a run that the statistics and the choice of rollouts read; a longer
run's journal may not fit into memory."""
ROLLOUTS = 3
"""Trees shown per kind: best, worst, most surprising."""
CHARACTERS = 40_000
"""The longest text of one tree."""

COMPONENTS = (
    "Every score column of the judges and the environment, as the mean over an update's trained"
    " turns. Groups whose rewards are all equal teach nothing."
)
STALE = "Updates between the version that sampled a token and the one being trained on it."
NUMERICS = (
    "Do engine and learner agree, and how far off-policy is the data? A dotted line is where the"
    " run warns."
)
LINES = (
    "A thin line has a point for every update, the bold one is its running mean over a twentieth of"
    " the updates. Below each figure are the means of its first and of its last tenth."
)
SEEDS = (
    "Runs of one name are seeds of one group: curves and tables show their mean and its 95%"
    " interval by Student's t, at the updates that all of them have reached."
)
ROLLOUT = (
    "The newest {:,} finished trees of each run are read, and shown of each group's first run. Best"
    " and worst are by outcome, or reward where there is none; most surprising is the largest"
    " advantage, or reward, or outcome. An action that was continued has a *."
)
COLUMNS = ("outcome", "reward", "step_reward", "spread")
"""What the heading of a tree shows."""

LEARNING = {
    "score/reward": "reward of the rollouts",
    "rollout/outcome": "outcome of the rollouts",
    "learner/entropy": "entropy (nats)",
    "learner/kl": "KL to the initial policy (nats)",
    "learner/surrogate": "surrogate objective",
    "learner/zero_advantage_share": "share of trained tokens with advantage 0",
    "learner/trained_tokens": "trained tokens per update",
    "learner/turns": "trained turns per update",
}
OVERVIEW = ("score/reward", "learner/entropy", "watch/sample_share", "learner/staleness_mean")
"""The metrics of a picture, unless others are asked for."""
STALENESS = {
    "learner/staleness_mean": "mean staleness (updates)",
    "learner/staleness_max": "largest staleness (updates)",
}
WATCH = {
    "watch/engine_gap_p99": ("|learner - engine log-probability|, p99", "engine_gap"),
    "watch/sample_share": ("effective sample share", "sample_share"),
    "learner/clip_share": ("share of clipped tokens", "clip_share"),
    "learner/mask_share": ("share of masked tokens", "mask_share"),
    "watch/ratio_p99": ("ratio of current to behaviour policy, p99", ""),
    "watch/ratio_p01": ("ratio of current to behaviour policy, p1", ""),
    "learner/grad_norm": ("gradient norm before clipping", ""),
    "watch/noise_scale": ("gradient noise scale (questions)", ""),
}
"""Title, and the key of [learner.watch] at which a warning comes."""
TIMES = {
    "busy/engine": "engines: busy share",
    "busy/learner": "learner: busy share",
    "rate/decoded_tokens": "decoded tokens per second",
    "learner/seconds": "seconds of an update",
    "time/spread": "seconds until all actors had the weights",
    "cache/hit_rate": "prefix cache: hit rate",
}


class Table(msgspec.Struct, frozen=True):
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
    """A part of the page. words: paragraphs. texts: headings with preformatted texts."""

    title: str
    words: list[str] = []
    figures: list[Drawn] = []
    tables: list[Table] = []
    texts: list[tuple[str, str]] = []

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")


def sections(
    groups: Groups, against: str = "version", metrics: Sequence[str] = ()
) -> list[Section]:
    """Return the parts of the page. metrics: replace the curves of the section Learning."""
    learning = {name: name for name in metrics} or LEARNING
    scores = _present(groups, "score/", "{}")
    scores |= _present(
        groups, EQUAL_SHARE, "share of groups of step {} whose rewards are all equal"
    )
    stale = STALENESS | _present(groups, f"{SHARE}staleness_", "share of tokens {} updates stale")
    watched = {metric: title for metric, (title, _) in WATCH.items()}
    parts = [
        _runs(groups),
        _heldout(groups),
        Section("Learning", [], _curves(groups, learning, against)),
        Section("Reward components", [COMPONENTS], _curves(groups, scores, against)),
        Section("Staleness", [STALE], _curves(groups, stale, against)),
        Section("Numerics watch", [NUMERICS], _curves(groups, watched, against, _limits(groups))),
        _time(groups, against),
        _trees(groups),
        _config(groups),
        _environment(groups),
    ]
    for section in parts:
        if not (section.figures or section.tables or section.texts):
            section.words.append("No run has recorded any of this.")
    return parts


def picture(groups: Groups, against: str = "version", metrics: Sequence[str] = ()) -> Figure:
    """Return one figure with a panel for each metric, by default those of ``OVERVIEW``. Raises
    ValueError if there is nothing to draw."""
    titles = {} if metrics else LEARNING | STALENESS
    drawn = {
        titles.get(metric, metric): {n: curve(runs, metric, against) for n, runs in groups.items()}
        for metric in metrics or OVERVIEW
    }
    if not any(one.x for curves in drawn.values() for one in curves.values()):
        raise ValueError(
            f"{', '.join(groups)}: no update was made yet, so there is nothing to draw; --out FILE.html says what is there"
        )
    return panels(drawn, "update" if against == "version" else "seconds")


def html(title: str, parts: Sequence[Section]) -> bytes:
    """Return the page. All texts are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("coppice.tools.inspecting", ""), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("report.html").render(title=title, sections=parts)
    return page.encode(errors="backslashreplace")


def markdown(table: Table) -> str:
    """Return a table for the terminal and for notes."""
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def compared(caption: str, columns: Mapping[str, Mapping[str, str]], folded: bool = False) -> Table:
    """Return a table with a column per run or group and a row per key that any of them has."""
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    rows = [[key, *(column.get(key, "-") for column in columns.values())] for key in keys]
    return Table(caption, ["", *columns], rows, folded)


def _everyone(groups: Groups) -> list[Run]:
    return [run for runs in groups.values() for run in runs]


def _present(groups: Groups, prefix: str, title: str) -> dict[str, str]:
    """The titles of the recorded metrics that begin with ``prefix``, in which {} is the rest."""
    names = set().union(*(run.metrics() for run in _everyone(groups)))
    known = sorted(name for name in names if name.startswith(prefix))
    return {name: title.format(name.removeprefix(prefix)) for name in known}


def _curves(
    groups: Groups, titles: Mapping[str, str], against: str, limits: Mapping[str, float] = {}
) -> list[Drawn]:
    label, figures = "update" if against == "version" else "seconds", []
    for metric, title in titles.items():
        curves = {name: curve(runs, metric, against) for name, runs in groups.items()}
        figures += _drawn(title, curves, label, limits.get(metric))
    return figures


def _drawn(
    title: str, curves: dict[str, Curve], label: str, limit: float | None = None
) -> list[Drawn]:
    """One figure, or none if there is no point."""
    if not any(one.x for one in curves.values()):
        return []
    limits = {title: limit} if limit else {}
    return [Drawn(title, panels({title: curves}, label, limits), caption(curves))]


def _names(groups: Groups) -> dict[str, Run]:
    """Return all runs by a heading: the name, with the place below the group's common folder where
    several have that name."""
    headings = {}
    for name, runs in groups.items():
        folders = [str(run.folder.resolve()) for run in runs]
        for run, folder in zip(runs, folders, strict=True):
            place = os.path.relpath(folder, os.path.commonpath(folders))
            headings[name if len(runs) == 1 else f"{name}: {place}"] = run
    return headings


def _runs(groups: Groups) -> Section:
    names = _names(groups)
    rows = [
        [name, run.state, str(len(run.records)), f"{run.records[-1].get('time/run', 0):.0f}" if run.records else "-",
         str(run.config.get("seed", "-")), str(run.folder)]
        for name, run in names.items()
    ]  # fmt: skip
    head = ["run", "state", "updates", "seconds", "seed", "folder"]
    words = [SEEDS] if any(len(runs) > 1 for runs in groups.values()) else []
    words += [f"{name}: {sentence}" for name, run in names.items() for sentence in run.missing]
    return Section("Runs", [*words, LINES], tables=[Table("The runs of this report", head, rows)])


def results(groups: Groups) -> Table:
    """Return the held-out measures of each group at the first and the last evaluation."""
    rows = []
    for name, runs in groups.items():
        for measure in measures(runs):
            c = heldout(runs, measure)
            points = list(zip(c.x, c.y, c.half, strict=True))
            cells = [
                f"{shown((mean, half))} (version {version:.0f})" for version, mean, half in points
            ]
            if len(points) > 1:
                rows.append([name, measure, cells[0], cells[-1], _verdict(points[0], points[-1])])
            elif points:
                rows.append([name, measure, *cells, "-", "-"])
    head = ["run", "measure", "first", "last", "change"]
    return Table("Held-out measures with 95% intervals", head, rows)


def _verdict(first: tuple[float, float, float], last: tuple[float, float, float]) -> str:
    (_, before, half), (_, after, other) = first, last
    if abs(after - before) > half + other:
        return "rose beyond both intervals" if after > before else "fell beyond both intervals"
    return "within the intervals" if half == half and other == other else "no interval"


def _heldout(groups: Groups) -> Section:
    figures = []
    for measure in measures(_everyone(groups)):
        curves = {name: heldout(runs, measure) for name, runs in groups.items()}
        figures += _drawn(measure, curves, "version")
    words = [
        "The interval of a single run is over its held-out tasks, that of a group over its seeds."
    ]
    for name, run in _names(groups).items():
        if baselines := run.summary.get("baselines"):
            values = ", ".join(f"{key} {value:.3f}" for key, value in baselines.items())
            words.append(f"{name}, without a model: {values}")
        if best := run.summary.get("best"):
            value = f"{best['measure']} is {best['value']:.3f}"
            words.append(f"{name}: the best {value}, of version {best['version']}.")
    table = results(groups)
    return Section("Held-out results", words, figures, [table] if table.rows else [])


def _limits(groups: Groups) -> dict[str, float]:
    """The thresholds of the watch, if all runs have the same."""
    watches = [run.config.get("learner", {}).get("watch", {}) for run in _everyone(groups)]
    same = watches[0] if all(watch == watches[0] for watch in watches) else {}
    return {metric: same[key] for metric, (_, key) in WATCH.items() if same.get(key)}


def _time(groups: Groups, against: str) -> Section:
    section = Section("Time", [], _curves(groups, TIMES, against))
    waits, phases, shares = {}, {}, {}
    for name, run in _names(groups).items():
        try:
            waits[name] = _spent(critical.budget(run.folder, run.records))
        except UNREADABLE as error:
            section.words.append(f"{name}: no causes of the wall time, because {error}.")
        seconds = run.summary.get("seconds", {})
        if "phases" in seconds:
            phases[name] = _spent(seconds["phases"])
        if training := seconds.get("training"):
            shares[name] = _spent(msgspec.convert(training, Training).rows(), training["seconds"])
    captions = {
        "Who waited for whom: each moment of the newest start has one cause": waits,
        "Phases of the newest start": phases,
        "Seconds per process from the first tree to the last update; these overlap": shares,
    }
    section.tables = [compared(words, columns) for words, columns in captions.items() if columns]
    return section


def _spent(seconds: Mapping[str, float], whole: float | None = None) -> dict[str, str]:
    total = whole or sum(seconds.values()) or 1.0
    rows = {name: f"{value:.1f} s ({value / total:.1%})" for name, value in seconds.items()}
    return rows if whole else rows | {"sum": f"{total:.1f} s"}


def _trees(groups: Groups) -> Section:
    section = Section("Trees and rollouts", [ROLLOUT.format(TREES)])
    columns, first = {}, {id(runs[0]) for runs in groups.values()}
    for name, run in _names(groups).items():
        with (
            contextlib.suppress(*UNREADABLE),
            contextlib.closing(frames.opened(run.folder)) as journal,
        ):  # Runs has said so
            tally = sorted(journal.tally().items())
            columns[name] = {f"trees {status}": f"{count:,}" for status, count in tally}
            rows = journal.trees("split='train' AND status!='growing'")[-TREES:]
            below = frames.nodes(journal, rows)
            table = frames.trees(journal, rows, below)
            if not below.is_empty():
                columns[name] |= _statistics(table, below.filter(frames.ACTION), run)
                section.words += _crashes(below, name)
                if id(run) not in first:
                    continue
                texts = _remarkable(journal, rows, table, name)
                section.texts += texts
                if not texts:
                    no_scores = "its trees have no scores, so none is the best or the worst."
                    section.words.append(f"{name}: {no_scores}")
    section.tables = [compared("Tree statistics", columns)] if columns else []
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
                text = drawing.as_text(journal, by_id[tree["tree"]], drawing.Detail(110, full=True))
                if len(text) > CHARACTERS:
                    text = f"{text[:CHARACTERS]}\n... (coppice trees RUN --tree {tree['tree']} --full prints the rest)"
                known = [c for c in COLUMNS if tree.get(c) is not None]
                values = [f"{column} {tree[column]:+.2f}" for column in known]
                head = f"{name}, {'most ' * (rank == 'surprising')}{rank}: tree {tree['tree']}, task {tree['task']}, version {tree['version']}"
                texts.append((f"{head} ({', '.join(values)})", text))
    return texts


def _crashes(below: pl.DataFrame, name: str) -> list[str]:
    """Return a sentence on the episodes that crashed, with the most frequent reason; none if there
    are none."""
    fates = below.filter(pl.col("fate").str.starts_with("crashed: "))["fate"]
    if fates.is_empty():
        return []
    reason, count = fates.value_counts(sort=True).row(0)
    often = f"most often ({count} times): {reason.removeprefix('crashed: ')}"
    return [f"{name}: {len(fates)} episodes crashed and score 0, {often}"]


def _statistics(table: pl.DataFrame, actions: pl.DataFrame, run: Run) -> dict[str, str]:
    """Return means over a run's trees and shares of their actions. A number that the run lacks is
    left out."""
    path, forwarded = (
        sum(r.get(f"learner/{kind}_tokens", 0.0) for r in run.records)
        for kind in ("path", "forwarded")
    )
    unread = (actions["valid"] == 0).mean() if "valid" in actions.columns else None
    means: dict[str, Any] = {
        "candidates per tree": table["actions"].mean(),
        "continued turns per tree": table["turns"].mean(),
        "sampled tokens per tree": table["sampled"].mean(),
        "tokens per candidate": actions["tokens"].mean(),
        "spread of rewards in a tree": table["spread"].mean(),
        "tokens of all paths per token forwarded": path / forwarded if forwarded else None,
    }
    shares: dict[str, Any] = {
        "candidates that could not be read": unread,
        "candidates with a score that no judge could give": (actions["judge_invalid"] > 0).mean(),
        "candidates cut by the token limit": (actions["finish"] == "length").mean(),
        "trees whose candidates have equal rewards": (table["spread"] == 0).mean(),
    }
    numbers = [(name, value, ".2f") for name, value in means.items()]
    numbers += [(name, value, ".2%") for name, value in shares.items()]
    return {name: format(value, form) for name, value, form in numbers if value is not None}


def _config(groups: Groups) -> Section:
    """Return what differs between the configs of the runs, or between the only run's and the
    shipped one of its name."""
    configs = {name: [run.config for run in runs if run.config] for name, runs in groups.items()}
    if sum(map(len, configs.values())) == 1:
        ((config,),) = filter(None, configs.values())
        path = ROOT / "configs" / f"{config.get('name')}.toml"
        with contextlib.suppress(ConfigError):
            shipped = msgspec.json.decode(as_json(load(path, [])))
            configs = {f"configs/{path.name}": [shipped], **configs}
    rows = differences(configs)
    section = Section("Configuration", [] if rows else [f"The same in {', '.join(configs)}."])
    section.tables = [Table("Keys whose values differ", ["key", *configs], rows)] if rows else []
    for name, run in _names(groups).items():
        settings = [list(row) for row in flat(run.config).items()]
        title, head = f"All settings of {name}", ["key", "value"]
        section.tables.append(Table(title, head, settings, folded=True))
    return section


def _environment(groups: Groups) -> Section:
    known = {name: dict(run.environment) for name, run in _names(groups).items() if run.environment}
    packages = {name: one.pop("packages", {}) for name, one in known.items()}
    columns = {n: {key: _value(key, one[key]) for key in one} for n, one in known.items()}
    section = Section("Environment and versions")
    if known:
        section.tables = [
            compared("Machine and code of the newest launch", columns),
            compared("Packages", packages, folded=True),
        ]
    if other := differences({name: [one] for name, one in packages.items()}):
        names = ", ".join(row[0] for row in other)
        section.words.append(f"Packages of different versions: {names}.")
    return section


def _value(key: str, value: object) -> str:
    if key == "memory_bytes" and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"
