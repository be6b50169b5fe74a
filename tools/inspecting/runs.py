"""Reads run folders for reports: live, failed and older ones too. What a run lacks is named in
``Run.missing`` and costs nothing else."""

import contextlib
import itertools
import json
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from coppice.common import shards
from coppice.scheduler.growth.dynamic_sampling import COMPARED, EQUAL
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Reader
from coppice.tools.launching import changes, status
from coppice.tools.launching.record import ENVIRONMENT

SHARE = "share/"
"""The prefix of metrics made here: share/staleness_1 is the share of the tokens that were sampled
one update before the version being trained."""
EQUAL_SHARE = "equal/"
"""The same for equal/1: the share of the compared groups of step 1 whose rewards are all equal
(scheduler/growth/dynamic_sampling.py)."""
_COMPARED = f"count/{COMPARED}"

UNREADABLE = (OSError, ValueError, sqlite3.Error, msgspec.MsgspecError)
"""Errors of a file of a run that is not there, cut off, damaged or of another version."""


class Run(msgspec.Struct, frozen=True):
    """A run folder. records: one per update, in order. evaluations: the held-out results, in the
    order of their versions. summary, config, environment: the contents of those files, empty where
    there is none. missing: sentences on what the folder lacks, and on settings that a resume
    changed."""

    folder: Path
    name: str
    state: str
    records: list[dict[str, float]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    missing: list[str]

    def metrics(self) -> set[str]:
        """Return the names that at least one record has."""
        return {name for record in self.records for name in record}


class Curve(msgspec.Struct, frozen=True):
    """Points of a figure. half: half widths of their 95% intervals, nan where there is none."""

    x: list[float]
    y: list[float]
    half: list[float]


def read(folder: Path, name: str | None = None) -> Run:
    """Read a run from its folder. Raises ValueError if ``folder`` is none."""
    if not any((folder / file).is_file() for file in ("config.json", "metrics.jsonl")):
        raise ValueError(
            f"{folder} is no run folder: it holds neither config.json nor metrics.jsonl"
        )
    missing: list[str] = []
    records = _records(folder)
    if not records:
        missing.append("It has made no update yet, so there are no curves.")
    ended = "the run has not ended in order, so some totals are missing"
    summary = _object(folder / "summary.json", ended, missing)
    config = _object(folder / "config.json", "its settings are unknown", missing)
    before = "it was launched before the machine and the packages were recorded"
    machine = _object(folder / ENVIRONMENT, before, missing)
    missing += _changed(folder, config)
    for home in shards.homes(folder)[1:]:
        ended = "another of its schedulers has not ended in order"
        other = _object(home / "summary.json", ended, missing)
        for of in {"counts", "calls"} & other.keys():
            summary[of] = Counter(summary.get(of)) + Counter(other[of])
    evaluations = _evaluations(folder, summary, missing)
    stands = status.gather(folder, time.monotonic())
    return Run(
        folder, name or folder.resolve().name, f"{stands.state}: {stands.said}", records, evaluations, summary, config,
        machine, missing,
    )  # fmt: skip


def _records(folder: Path) -> list[dict[str, float]]:
    """One record per update, with the share of its tokens by their age, and of its groups with
    equal rewards by their step."""
    records = Reader(folder).read()
    names = {name for record in records for name in record}
    ages = [name for name in names if re.fullmatch(r"watch/staleness_\d+/tokens", name)]
    steps = [name.removeprefix(_COMPARED) for name in names if name.startswith(_COMPARED)]
    before: dict[str, float] = {}
    for record in records:
        # of the groups that were emitted since the record before
        new = lambda name, now=record, then=before: now.get(name, 0.0) - then.get(name, 0.0)  # noqa: E731
        for step in steps:
            if (compared := new(_COMPARED + step)) > 0:
                record[f"{EQUAL_SHARE}{step}"] = new(f"count/{EQUAL}{step}") / compared
        if total := sum(record.get(age, 0.0) for age in ages):
            record |= {f"{SHARE}{age.split('/')[1]}": record.get(age, 0.0) / total for age in ages}
        before = record
    return records


def _object(path: Path, consequence: str, missing: list[str]) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except UNREADABLE as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        missing.append(f"{path.name} {why}: {consequence}.")
    return {}


def _changed(folder: Path, config: dict[str, Any]) -> list[str]:
    """Say which settings each resume of the run has changed."""
    try:
        configs = [*changes.former(folder), config]
    except UNREADABLE as error:
        return [f"Its former settings cannot be read ({error})."]
    steps = [changes.differences(*pair) for pair in itertools.pairwise(configs)]
    return [f"A resume changed its settings: {'; '.join(map(str, step))}." for step in steps]


def _evaluations(folder: Path, summary: dict[str, Any], missing: list[str]) -> list[dict[str, Any]]:
    """The held-out results of the journal, or of the summary if the journal cannot be read."""
    try:
        with contextlib.closing(Journal(folder / "journal.sqlite", readonly=True)) as journal:
            results = [{**result, "version": v} for v, _, result in journal.evaluations()]
    except UNREADABLE as error:
        missing.append(f"Its journal cannot be read ({error}), so its trees are not shown.")
        results = sorted(summary.get("heldout", {}).values(), key=lambda result: result["version"])
    if not results:
        missing.append("It has no held-out evaluation.")
    return list({result["version"]: result for result in results}.values())


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs by name: those of one name are seeds of one group."""
    return {run.name: [other for other in runs if other.name == run.name] for run in runs}


def check_metrics(runs: Sequence[Run], metrics: Sequence[str]) -> None:
    """Raise ValueError if one of the metrics was recorded by none of the runs."""
    known = sorted(set().union(*(run.metrics() for run in runs)))
    if missing := [metric for metric in metrics if metric not in known]:
        raise ValueError(
            f"metric {', '.join(missing)}: no run has recorded it; there are {', '.join(known) or 'none yet'}"
        )


def curve(runs: Sequence[Run], metric: str, against: str = "version") -> Curve:
    """Return a metric of a group at the updates that all its runs have recorded, against "version"
    or "time/run" (seconds; the mean over runs).

    A single run has its own values; several have their mean with the 95% interval over seeds.
    """
    points = [
        {r["version"]: (r[against], r[metric], math.nan) for r in run.records if metric in r}
        for run in runs
    ]
    return _mean(points)


def heldout(runs: Sequence[Run], measure: str) -> Curve:
    """Return a held-out measure of a group at the versions at which all its runs were evaluated.

    The interval of a single run is that of its evaluation, over questions; that of several is over
    seeds.
    """
    points = [
        {e["version"]: (e["version"], *(e["measures"][measure][part] for part in ("mean", "half"))) for e in run.evaluations if measure in e["measures"]}
        for run in runs
    ]  # fmt: skip
    return _mean(points)


def _mean(points: list[dict[float, tuple[float, float, float]]]) -> Curve:
    """points: for each run, (x, y, half width) by version."""
    versions = sorted(set.intersection(*map(set, points)))
    rows = [points[0][version] for version in versions]
    if len(points) > 1:
        each = [[run[version] for run in points] for version in versions]
        rows = [(fmean(p[0] for p in of), *interval([p[1] for p in of])) for of in each]
    x, y, half = ([float(row[i]) for row in rows] for i in range(3))
    return Curve(x, y, half)


def measures(runs: Sequence[Run]) -> list[str]:
    """Return the held-out measures that the runs have, the headline first."""
    results = [evaluation for run in runs for evaluation in run.evaluations]
    names = sorted({name for result in results for name in result["measures"]})
    headlines = {result.get("headline") for result in results}
    return sorted(names, key=lambda name: name not in headlines)


T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95% quantiles of Student's t by degrees of freedom."""


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its 95% interval by Student's t (nan for one
    seed)."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return mean, math.nan
    return mean, T_95[min(9, n - 1)] * stdev(values) / math.sqrt(n)


def shown(estimate: tuple[float, float]) -> str:
    """Return a mean and its half width in words, "0.500 ±0.100", or the mean alone if it has no
    interval."""
    mean, half = estimate
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ±{half:.3f}"


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values of nested tables as JSON texts by their dotted paths."""
    if isinstance(tree, dict) and tree:
        below = [flat(value, f"{path}.{name}") for name, value in tree.items()]
        return dict(itertools.chain.from_iterable(part.items() for part in below))
    return {path.removeprefix("."): json.dumps(tree, ensure_ascii=False)}


def differences(groups: Mapping[str, Sequence[dict[str, Any]]]) -> list[list[str]]:
    """Return a row for each key whose values are not the same in all trees: the key, then each
    group's values ("-" where a tree lacks it)."""
    flats = {name: [flat(tree) for tree in trees] for name, trees in groups.items()}
    everyone = [one for trees in flats.values() for one in trees]
    rows = []
    for key in sorted(set().union(*everyone)):
        if len({one.get(key) for one in everyone}) > 1:
            each = [[one.get(key, "-") for one in trees] for trees in flats.values()]
            rows.append([key, *(", ".join(dict.fromkeys(values)) for values in each)])
    return rows
