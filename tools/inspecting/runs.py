"""Reads run folders for reports: live, failed and older ones too. What a run lacks is named in
``Run.missing`` and costs nothing else."""

import itertools
import json
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import shards
from coppice.scheduler.growth.dynamic_sampling import COMPARED, EQUAL
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Reader
from coppice.tools.inspecting.intervals import interval
from coppice.tools.launching import changes, environment, status

SHARE = "share/"
"""The prefix of metrics made here: share/staleness_1 is the share of the tokens that were sampled
one update before the version being trained."""
EQUAL_SHARE = "equal/"
"""The same for equal/1: the share of the compared groups of step 1 whose rewards are all equal
(scheduler/growth/dynamic_sampling.py)."""


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
    summary, config, machine = (
        _object(folder / file, consequence, missing)
        for file, consequence in (
            ("summary.json", "the run has not ended in order, so some totals are missing"),
            ("config.json", "its settings are unknown"),
            (environment.NAME, "it was launched before the machine and the packages were recorded"),
        )
    )
    missing += _changed(folder, config)
    for home in shards.homes(folder)[1:]:
        other = _object(
            home / "summary.json", "another of its schedulers has not ended in order", missing
        )
        summary |= {
            of: Counter(summary.get(of)) + Counter(other.get(of))
            for of in ("counts", "calls")
            if of in other
        }
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
    _equal(records)
    ages = {
        name
        for record in records
        for name in record
        if re.fullmatch(r"watch/staleness_\d+/tokens", name)
    }
    for record in records:
        if total := sum(record.get(age, 0.0) for age in ages):
            record |= {f"{SHARE}{age.split('/')[1]}": record.get(age, 0.0) / total for age in ages}
    return records


def _equal(records: list[dict[str, float]]) -> None:
    """Add to each record, by step, the share of the groups that were emitted since the record
    before whose rewards are all equal."""
    before: dict[str, float] = {}
    for record in records:
        for name in [name for name in record if name.startswith(f"count/{COMPARED}")]:
            step = name.removeprefix(f"count/{COMPARED}")
            equal = f"count/{EQUAL}{step}"
            if (compared := record[name] - before.get(name, 0.0)) > 0:
                record[f"{EQUAL_SHARE}{step}"] = (
                    record.get(equal, 0.0) - before.get(equal, 0.0)
                ) / compared
        before = record


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
    told = [
        "; ".join(map(str, changes.differences(old, new)))
        for old, new in itertools.pairwise(configs)
    ]
    return [f"A resume changed its settings: {text}." for text in told]


def _evaluations(folder: Path, summary: dict[str, Any], missing: list[str]) -> list[dict[str, Any]]:
    """The held-out results of the journal, or of the summary if the journal cannot be read."""
    try:
        journal = Journal(folder / "journal.sqlite", readonly=True)
        try:
            results = [
                {**result, "version": version} for version, _, result in journal.evaluations()
            ]
        finally:
            journal.close()
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
    return _mean(
        [
            {r["version"]: (r[against], r[metric], math.nan) for r in run.records if metric in r}
            for run in runs
        ]
    )


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
    if len(points) == 1:
        rows = [points[0][version] for version in versions]
    else:
        rows = [
            (sum(p[v][0] for p in points) / len(points), *interval([p[v][1] for p in points]))
            for v in versions
        ]
    x, y, half = ([float(row[i]) for row in rows] for i in range(3))
    return Curve(x, y, half)


def measures(runs: Sequence[Run]) -> list[str]:
    """Return the held-out measures that the runs have, the headline first."""
    results = [evaluation for run in runs for evaluation in run.evaluations]
    names = sorted({name for result in results for name in result["measures"]})
    headlines = {result.get("headline") for result in results}
    return sorted(names, key=lambda name: name not in headlines)


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values of nested tables as JSON texts by their dotted paths."""
    if isinstance(tree, dict) and tree:
        return {
            key: value
            for name, below in tree.items()
            for key, value in flat(below, f"{path}.{name}").items()
        }
    return {path.removeprefix("."): json.dumps(tree, ensure_ascii=False)}


def differences(groups: Mapping[str, Sequence[dict[str, Any]]]) -> list[list[str]]:
    """Return a row for each key whose values are not the same in all trees: the key, then each
    group's values ("-" where a tree lacks it)."""
    flats = {name: [flat(tree) for tree in trees] for name, trees in groups.items()}
    everyone = [one for trees in flats.values() for one in trees]
    keys = sorted(
        key for key in set().union(*everyone) if len({one.get(key) for one in everyone}) > 1
    )
    return [
        [
            key,
            *(
                ", ".join(dict.fromkeys(one.get(key, "-") for one in trees))
                for trees in flats.values()
            ),
        ]
        for key in keys
    ]
