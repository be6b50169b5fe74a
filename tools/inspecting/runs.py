"""Reads run folders for reports: live, failed and older ones too. What a run lacks is named in
``RunFolder.missing`` and costs nothing else."""

import contextlib
import itertools
import json
import math
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from coppice.common import shards
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Reader, parsed
from coppice.scheduler.telemetry.verdict import EQUAL_SHARE, equal_shares
from coppice.tools.launching import changes, status
from coppice.tools.launching.record import ENVIRONMENT

SHARE = "share/"
"""The prefix of metrics made here: share/staleness_1 is the share of the tokens that were sampled
one update before the version being trained."""

UNREADABLE = (OSError, ValueError, sqlite3.Error, msgspec.MsgspecError)
"""Errors of a file of a run that is not there, cut off, damaged or of another version."""


class RunFolder(msgspec.Struct, frozen=True):
    """A run folder. records: one per update, in order. evaluations: the held-out results, in the
    order of their versions. config, environment: the contents of those files, empty where there is
    none. missing: sentences on what the folder lacks, and on settings that a resume
    changed."""

    folder: Path
    name: str
    state: str
    records: list[dict[str, float]]
    evaluations: list[dict[str, Any]]
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


def read(folder: Path, name: str | None = None) -> RunFolder:
    """Read a run from its folder. Raises ValueError if ``folder`` is none."""
    if not any((folder / file).is_file() for file in ("config.json", "metrics.jsonl")):
        raise ValueError(
            f"{folder} is no run folder: it holds neither config.json nor metrics.jsonl"
        )
    missing: list[str] = []

    def content(path: Path) -> dict[str, Any]:
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except UNREADABLE as error:
            absent = isinstance(error, FileNotFoundError)
            why = "is missing" if absent else f"cannot be read ({error})"
            missing.append(f"{path.relative_to(folder)} {why}.")
        return {}

    records = _records(folder)
    if not records:
        missing.append("It has made no update yet, so there are no curves.")
    names = ("summary.json", "config.json", ENVIRONMENT)
    summary, config, environment = (content(folder / name) for name in names)
    try:
        for old, new in itertools.pairwise([*changes.former(folder), config]):
            changed = "; ".join(map(str, changes.differences(old, new)))
            missing.append(f"A resume changed its settings: {changed}.")
    except UNREADABLE as error:
        missing.append(f"Its former settings cannot be read ({error}).")
    try:
        with Journal(folder / "journal.sqlite", readonly=True) as journal:
            results = [{**result, "version": v} for v, _, result in journal.evaluations()]
    except UNREADABLE as error:
        missing.append(f"Its journal cannot be read ({error}).")
        results = sorted(summary.get("heldout", {}).values(), key=lambda result: result["version"])
    if not results:
        missing.append("It has no held-out evaluation.")
    evaluations = list({result["version"]: result for result in results}.values())
    how = evaluations[-1].get("how") if evaluations else None
    alike = [result for result in evaluations if result.get("how") == how]
    if others := len(evaluations) - len(alike):
        missing.append(f"Of its evaluations {others} had other settings and are left out.")
    now = status.gather(folder, time.monotonic())
    missing += _damaged(folder, now.state == "running")
    parts = (records, alike, config, environment, missing)
    return RunFolder(folder, name or folder.resolve().name, f"{now.state}: {now.said}", *parts)


def _damaged(folder: Path, live: bool) -> Iterator[str]:
    """Name the metrics.jsonl whose lines are left out. live: its last line may be half written."""
    for home in shards.homes(folder):
        path = home / "metrics.jsonl"
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            text = text[: text.rfind(b"\n") + 1] if live else text
            if bad := len(text.splitlines()) - len([*parsed(text)]):
                where = f"{path.relative_to(folder)} has {bad} damaged lines, which are left out"
                yield f"{where} (coppice watch --audit names them)."


def _records(folder: Path) -> list[dict[str, float]]:
    """One record per update, with the share of its tokens by their age, and of equal groups."""
    records = Reader(folder).read()
    recorded = {name for record in records for name in record}
    earlier = last = 0.0  # "time/run" begins anew at each start
    for record in records:
        if "time/run" in record:
            earlier = last if earlier + record["time/run"] < last else earlier
            last = record["time/run"] = earlier + record["time/run"]
    ages = [name for name in recorded if re.fullmatch(r"watch/staleness_\d+/tokens", name)]
    for record in records:
        if total := sum(record.get(age, 0.0) for age in ages):
            record |= {f"{SHARE}{age.split('/')[1]}": record.get(age, 0.0) / total for age in ages}
    equal = equal_shares(records)
    return [r | {EQUAL_SHARE: equal[v]} if (v := r["version"]) in equal else r for r in records]


def grouped(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Return the runs by name: those of one name are seeds of one group."""
    return {run.name: [other for other in runs if other.name == run.name] for run in runs}


def check_metrics(runs: Sequence[RunFolder], metrics: Sequence[str]) -> None:
    """Raise ValueError if one of the metrics was recorded by none of the runs."""
    heldout = (f"heldout/{measure}" for measure in measures(runs))
    names = sorted(set().union(*(run.metrics() for run in runs), heldout))
    if missing := [metric for metric in metrics if metric not in names]:
        recorded = ", ".join(names) or "none yet"
        raise ValueError(
            f"metric {', '.join(missing)}: no run has recorded it; there are {recorded}"
        )


def curve(runs: Sequence[RunFolder], metric: str, against: str = "version") -> Curve:
    """Return a metric of a group at the updates that all its runs have recorded, against "version"
    or "time/run" (seconds; the mean over runs).

    A single run has its own values; several have their mean with the 95% interval over seeds.
    """
    needs = {metric, against}
    return _mean(
        {r["version"]: (r[against], r[metric], math.nan) for r in run.records if needs <= r.keys()}
        for run in runs
    )


def heldout(runs: Sequence[RunFolder], measure: str) -> Curve:
    """Return a held-out measure of a group at the versions at which all its runs were evaluated.

    The interval of a single run is that of its evaluation, over questions; that of several is over
    seeds.
    """
    return _mean(
        {
            e["version"]: (e["version"], m["mean"], m["half"])
            for e in run.evaluations
            if (m := e["measures"].get(measure))
        }
        for run in runs
    )


def _mean(of_runs: Iterable[dict[float, tuple[float, float, float]]]) -> Curve:
    """of_runs: for each run, (x, y, half width) by version."""
    points = list(of_runs)
    versions = sorted(set.intersection(*map(set, points)))
    each = [[run[version] for run in points] for version in versions]
    if len(points) > 1:
        rows = [(fmean(p[0] for p in of), *interval([p[1] for p in of])) for of in each]
    else:
        rows = [row for (row,) in each]
    x, y, half = ([float(row[i]) for row in rows] for i in range(3))
    return Curve(x, y, half)


def measures(runs: Sequence[RunFolder]) -> list[str]:
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
    return mean, T_95[min(9, n - 1)] * stdev(values) / math.sqrt(n) if n > 1 else math.nan


def shown(estimate: tuple[float, float]) -> str:
    """Return "0.500 ±0.100" for a mean and its half width, or the mean alone without interval."""
    mean, half = estimate
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ±{half:.3f}"


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values of nested tables as JSON texts by their dotted paths."""
    if not (isinstance(tree, dict) and tree):
        return {path.removeprefix("."): json.dumps(tree, ensure_ascii=False)}
    below = [flat(value, f"{path}.{name}") for name, value in tree.items()]
    return {key: value for part in below for key, value in part.items()}


def differences(groups: Mapping[str, Sequence[dict[str, Any]]]) -> list[list[str]]:
    """Return a row for each key whose values are not the same in all trees: the key, then each
    group's values ("-" where a tree lacks it)."""
    flats = [[flat(tree) for tree in trees] for trees in groups.values()]
    everyone = [one for trees in flats for one in trees]
    rows = []
    for key in sorted(set().union(*everyone)):
        if len({one.get(key) for one in everyone}) > 1:
            each = [dict.fromkeys(one.get(key, "-") for one in trees) for trees in flats]
            rows.append([key, *map(", ".join, each)])
    return rows
