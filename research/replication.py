"""The command coppice dev replicate runs an experiment of several arms and seeds on this machine
and draws its curves with intervals.

Each arm is a config with changed keys. Each run is an ordinary run folder, so an interrupted
replication can be continued and the other tools can read every run. Arms are compared at equal
environment steps and at equal generated tokens.
"""

import argparse
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from coppice.common.atomic import as_json, write_whole
from coppice.common.options import command_parser, gave_up
from coppice.research.studies import STUDIES, Arm
from coppice.tools.bootstrap import ROOT
from coppice.tools.defaults.facts import ensure_facts
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.inspecting.figures import save
from coppice.tools.inspecting.runs import interval, shown
from coppice.tools.launching.config import ConfigError, load

STEPS = ("count/environment_steps", "count/continuation_steps")
"""Environment steps of trained episodes and of Monte Carlo continuations. A step of either costs
the same."""
TOKENS = "count/generated_tokens"
RECORDS = ROOT / "research" / "records"
"""Finished runs whose metrics are kept with the project: STUDY/ARM/seedN.jsonl.gz. They are not run
again, and a report reads them like run folders. Remove those of an arm whose config changes."""
CPU_SECONDS = "cpu_seconds"
"""File of a run's folder: the CPU seconds of all its processes, one line for each start."""


class StudyCurve(msgspec.Struct, frozen=True):
    """The held-out evaluations of one run: policy version, environment steps (with continuations)
    and tokens so far, and the measure.

    cpu_seconds: of the whole run, all processes, set-up and evaluations included; 0 for a run made
    before they were counted.
    """

    version: list[int]
    steps: list[float]
    tokens: list[float]
    value: list[float]
    cpu_seconds: float = 0.0


def slug(name: str) -> str:
    """Return ``name`` as a folder name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def recorded(out: Path, name: str, seed: int) -> Path:
    """Return where the metrics of a run are kept with the project. out: named like the study."""
    return RECORDS / out.name / slug(name) / f"seed{seed}.jsonl.gz"


def keep(out: Path, name: str, seed: int) -> None:
    """Keep the metrics of a finished run to seven digits, and its CPU seconds as a last line."""
    folder, kept = out / slug(name) / f"seed{seed}", recorded(out, name, seed)
    if (folder / "summary.json").is_file() and not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        records = [*rows(folder), {"version": 0, CPU_SECONDS: spent(folder)}]
        short = ({name: float(f"{value:.7g}") for name, value in r.items()} for r in records)
        whole = "".join(f"{json.dumps(record)}\n" for record in short)
        kept.write_bytes(gzip.compress(whole.encode(), mtime=0))


def spent(folder: Path) -> float:
    """Return the CPU seconds of a run's folder, 0 if its study was killed before that."""
    cost = folder / CPU_SECONDS
    return sum(map(float, cost.read_text().split())) if cost.is_file() else 0.0


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run folder, or of a file of ``RECORDS``."""
    if run.suffix == ".gz":
        lines = gzip.decompress(run.read_bytes()).decode()
    else:
        lines = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


def with_hops(out: Path, hops: int) -> list[str]:
    """Write the default questions with so many hops into ``out``; return the changes that take
    them."""
    facts = ensure_facts(cache_folder())
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "heldout"):
        lines = (facts / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (out / f"{name}.jsonl").write_text(
            "".join(x for x in lines if json.loads(x)["hops"] == hops)
        )
    return [f"data.{name}={out.resolve() / name}.jsonl" for name in ("train", "heldout")]


def own_start(out: Path, arm: Arm, seed: int) -> list[str]:
    """Return the changes that give a seed a warm start of its own and, if the task is the default
    one, 128 held-out questions of its own, which are written into ``out``."""
    changes = [f"warm_start.seed={seed + 1}"]
    data = load(ROOT / "configs" / f"{arm.config}.toml", arm.changes).data
    if (data.environment, data.heldout) != ("search_qa", "default"):
        return changes
    questions = (ensure_facts(cache_folder()) / "heldout.jsonl").read_text().splitlines(True)
    own = out.resolve() / f"heldout-{seed}.jsonl"
    own.parent.mkdir(parents=True, exist_ok=True)
    write_whole(own, "".join(random.Random(seed).sample(questions, 128)).encode())
    return [*changes, f"data.heldout={own}"]


def run_all(
    arms: dict[str, Arm], out: Path, seeds: int, parallel: int, changes: list[str],
    starts: bool = False,
) -> list[str]:  # fmt: skip
    """Start the runs that are missing, at most ``parallel`` at once, and return the names of those
    that failed. starts: each seed has a warm start of its own."""
    everything = [(name, arm, seed) for seed in range(seeds) for name, arm in arms.items()]
    todo = [job for job in everything if not recorded(out, job[0], job[2]).is_file()]
    own = [own_start(out, arm, seed) if starts else [] for _, arm, seed in todo]

    def run(job: tuple[str, Arm, int], more: list[str]) -> bool:
        name, arm, seed = job
        return _run(out / slug(name) / f"seed{seed}", arm, seed, [*changes, *more])

    with ThreadPoolExecutor(parallel) as pool:
        results = pool.map(run, todo, own)
        return [
            f"{name}, seed {seed}"
            for (name, _, seed), ok in zip(todo, results, strict=True)
            if not ok
        ]


def _run(folder: Path, arm: Arm, seed: int, changes: list[str]) -> bool:
    path, overrides = (
        ROOT / "configs" / f"{arm.config}.toml",
        [*arm.changes, f"seed={seed}", *changes],
    )
    command = [sys.executable, str(ROOT / "tools" / "launch")]
    if (folder / "config.json").is_file():
        if (folder / "config.json").read_bytes() != as_json(load(path, overrides)):
            raise ConfigError(
                f"{folder} was made with another config: choose another --out, or remove the folder"
            )
        if (folder / "summary.json").is_file():
            return True
        command += ["--resume", str(folder)]
    else:
        command += ["--config", str(path), "--run-folder", str(folder)]
        for change in overrides:
            command += ["--set", change]
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with (folder / "output.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
    cpu = usage.ru_utime + usage.ru_stime
    with (folder / CPU_SECONDS).open("a") as parts:
        parts.write(f"{cpu:.1f}\n")
    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - start
    print(f"{folder}: status {code} after {seconds:.0f} s, CPU {cpu:.0f} s", flush=True)
    return status == 0


def curve(folder: Path, measure: str) -> StudyCurve:
    """Read the held-out evaluations of a run in order. A version that was evaluated twice counts
    once. Raises ValueError."""
    values: dict[int, float] = {}
    work: dict[int, dict[str, float]] = {}
    cpu = spent(folder)
    for row in rows(folder):
        cpu = row.get(CPU_SECONDS, cpu)
        version = int(row["version"])
        counted = work.setdefault(version, {})
        counted |= {key: max(counted.get(key, 0.0), row.get(key, 0.0)) for key in (*STEPS, TOKENS)}
        if f"heldout/{measure}" in row:
            values[version] = row[f"heldout/{measure}"]
    if not values:
        raise ValueError(f"{folder} has no held-out {measure!r}")
    versions = sorted(values)
    steps = [sum(work[version][key] for key in STEPS) for version in versions]
    if any(later < earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(
            f"{folder}: the counts of steps decrease: a version that did not keep them resumed it"
        )
    return StudyCurve(
        versions, steps, [work[v][TOKENS] for v in versions], [values[v] for v in versions], cpu
    )


def at(curve: StudyCurve, axis: Sequence[float], place: float) -> float:
    """Interpolate the measure linearly at ``place`` on ``axis`` (the versions, steps or tokens of
    the curve)."""
    return float(np.interp(place, axis, curve.value))


def mean(curve: StudyCurve, updates: int) -> float:
    """Return the mean of the measure, linear between evaluations, over the first ``updates``."""
    values = [at(curve, curve.version, version) for version in range(updates + 1)]
    return (sum(values) - (values[0] + values[-1]) / 2) / updates


def table(curves: dict[str, list[StudyCurve]], measure: str) -> str:
    """Return a Markdown table of the measure at the start, at the end, at the updates, steps and
    tokens that every arm reached, and its mean over these updates (the area under its curve)."""
    everyone = [c for arm_curves in curves.values() for c in arm_curves]
    steps, tokens = min(c.steps[-1] for c in everyone), min(c.tokens[-1] for c in everyone)
    updates = min(c.version[-1] for c in everyone)
    heads = [
        "arm", "seeds", "start", "mean over updates", f"at {updates} updates",
        f"at {steps:,.0f} steps", f"at {tokens:,.0f} tokens", "end", "steps", "tokens",
        "CPU seconds",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, arm_curves in curves.items():
        cells = [
            shown(interval([c.value[0] for c in arm_curves])),
            shown(interval([mean(c, updates) for c in arm_curves])),
            shown(interval([at(c, c.version, updates) for c in arm_curves])),
            shown(interval([at(c, c.steps, steps) for c in arm_curves])),
            shown(interval([at(c, c.tokens, tokens) for c in arm_curves])),
            shown(interval([c.value[-1] for c in arm_curves])),
            f"{np.mean([c.steps[-1] for c in arm_curves]):,.0f}",
            f"{np.mean([c.tokens[-1] for c in arm_curves]):,.0f}",
            f"{np.mean([c.cpu_seconds for c in arm_curves]):,.0f}"
            if all(c.cpu_seconds for c in arm_curves)
            else "not counted",
        ]
        lines.append(f"| {name} | {len(arm_curves)} | {' | '.join(cells)} |")
    return f"Held-out {measure}, mean over seeds and 95% interval:\n\n" + "\n".join(lines)


def against(curves: dict[str, list[StudyCurve]], pairs: bool = False) -> str:
    """Return a Markdown table of the first arm's mean minus each other arm's, at the updates, steps
    and tokens that both reached, with Welch's 95% interval and p. Holm corrects p for all cells of
    the table: two-sided, and seeds of the same number are no pairs. pairs: they are, because they
    share a warm start of their own, so the t-test is of their differences."""
    (first, own), *others = curves.items()
    cells = []
    for name, kind in itertools.product(dict(others), ("version", "steps", "tokens")):
        both = own, curves[name]
        place = min(getattr(c, kind)[-1] for arm in both for c in arm)
        values = [[at(c, getattr(c, kind), place) for c in arm] for arm in both]
        tested = compared(*values, pairs=pairs)
        cells.append((name, kind.replace("version", "updates"), place, *tested))
    corrected = holm([p for *_, p in cells])
    lines = [
        f"| {name} | {place:,.0f} {kind} | {difference:+.3f} ±{half:.3f} | {p:.2g} |"
        for (name, kind, place, difference, half, _), p in zip(cells, corrected, strict=True)
    ]
    heads = f"| {first} against | at | difference | p ({len(cells)} cells) |\n|---|---|---|---|"
    return "\n".join([heads, *lines])


def compared(
    one: list[float], other: list[float], pairs: bool = False
) -> tuple[float, float, float]:
    """Return the difference of two means, the half width of its 95% interval, and p: Welch's, or
    those of the differences if the values are pairs."""
    test: Any = (
        stats.ttest_rel(one, other) if pairs else stats.ttest_ind(one, other, equal_var=False)
    )
    low, high = test.confidence_interval()
    return float(low + high) / 2, float(high - low) / 2, float(test.pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p values corrected for their number by Holm's step-down method."""
    order = np.argsort(ps)
    grown = np.maximum.accumulate(np.array(ps)[order] * np.arange(len(ps), 0, -1))
    corrected = np.empty(len(ps))
    corrected[order] = np.minimum(grown, 1)
    return corrected.tolist()


def reached(arm: list[StudyCurve], level: float) -> stats.CensoredData:
    """Return at how many tokens each run's measure was first at least ``level`` (interpolated
    between evaluations); a run that never was is censored at its end."""
    times, ends = [], []
    for c in arm:
        later = [i for i, value in enumerate(c.value) if value >= level]
        if not later:
            ends.append(c.tokens[-1])
        else:
            i = max(later[0] - 1, 0)
            times.append(float(np.interp(level, c.value[i : i + 2], c.tokens[i : i + 2])))
    return stats.CensoredData(uncensored=times, right=ends)


def to_level(curves: dict[str, list[StudyCurve]], level: float) -> str:
    """Return a Markdown table of the tokens until the measure is ``level``: how many seeds reached
    it, the Kaplan-Meier median, and the log-rank test against the first arm (Holm)."""
    data = {name: reached(arm, level) for name, arm in curves.items()}
    there = {name: sum(max(c.value) >= level for c in arm) for name, arm in curves.items()}
    (first, own), *others = data.items()
    # no event in either arm: nothing to compare
    raw = [
        float(stats.logrank(own, d).pvalue) if there[first] + there[n] else 1.0 for n, d in others
    ]
    ps = ["", *(f"{p:.2g}" for p in holm(raw))]
    heads = f"| arm | seeds at {level:g} | median tokens until then | p (log-rank) |"
    lines = [heads, "|---" * 4 + "|"]
    for (name, d), p in zip(data.items(), ps, strict=True):
        alive = stats.ecdf(d).sf
        below = alive.quantiles[alive.probabilities <= 0.5]
        median = f"{below[0]:,.0f}" if len(below) else "not reached"
        lines.append(f"| {name} | {there[name]} of {len(curves[name])} | {median} | {p} |")
    return "\n".join(lines)


def by_part(runs: dict[str, list[Path]], parts: Sequence[str]) -> str:
    """Return a Markdown table of held-out measures of the first arm's start and of each arm's end.
    A cell is the mean over seeds and the mean of their 95% intervals by task, which is the wider
    the more alike the seeds are."""
    held = {
        name: [[row for row in rows(run) if f"heldout/{parts[0]}" in row] for run in arm]
        for name, arm in runs.items()
    }
    start = next(iter(held.values()))
    lines = [f"| arm | {' | '.join(parts)} |", "|---" * (1 + len(parts)) + "|"]
    for name, place, several in [("start", 0, start), *((n, -1, s) for n, s in held.items())]:
        ends = [run[place] for run in several]
        means = [np.mean([end[f"heldout/{part}"] for end in ends]) for part in parts]
        halves = [np.mean([end[f"heldout/{part}_half"] for end in ends]) for part in parts]
        cells = [f"{mean:.3f} ±{half:.3f}" for mean, half in zip(means, halves, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "Held-out, mean over seeds and 95% interval by task:\n\n" + "\n".join(lines)


def draw(
    curves: dict[str, list[StudyCurve]], measure: str, title: str, ceiling: float | None = None
) -> Figure:
    """Draw the measure against environment steps and against generated tokens, with a band for the
    95% interval over seeds. ceiling: the best that the measure can be, drawn as a line."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = {
        "steps": "environment steps, continuations included", "tokens": "generated tokens"
    }  # fmt: skip
    for axis, (kind, label) in zip(axes, labels.items(), strict=True):
        for name, arm_curves in curves.items():
            length = min(len(c.value) for c in arm_curves)
            x = np.mean([getattr(c, kind)[:length] for c in arm_curves], axis=0)
            bands = [interval([c.value[i] for c in arm_curves]) for i in range(length)]
            middle, half = np.array([b[0] for b in bands]), np.nan_to_num([b[1] for b in bands])
            axis.plot(x, middle, marker=".", label=name)
            axis.fill_between(x, middle - half, middle + half, alpha=0.2)
        if ceiling is not None:
            axis.axhline(ceiling, color="black", linestyle="--", linewidth=1, label="optimum")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"held-out {measure}")
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


EXAMPLES = """\
  coppice dev replicate vpr-tictactoe              all arms and seeds of a study
  coppice dev replicate slate --seeds 1 --only ARM      one arm once
  coppice dev replicate ppr --set scheduler.updates=20  shorter runs
  coppice dev replicate ppr --report           the table of what has finished"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev replicate."""
    parser = command_parser(
        "coppice dev replicate",
        "Run an experiment of several arms and seeds; print its table, draw its curves.",
        EXAMPLES,
    )
    parser.add_argument(
        "study", choices=sorted(STUDIES), metavar="STUDY",
        help=f"one of {', '.join(sorted(STUDIES))}",
    )  # fmt: skip
    out = "folder of the runs (default: runs/replication/STUDY)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=out)
    parser.add_argument("--seeds", type=int, help="seeds per arm (default: the study's)")
    cores, parallel = len(os.sched_getaffinity(0)), "runs at once (default: %(default)s)"
    parser.add_argument("--parallel", type=int, default=cores, help=parallel)
    only, every = "run only this arm; repeatable", "change a key in every run; repeatable"
    parser.add_argument("--only", action="append", metavar="ARM", help=only)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=every)
    level = "also: the tokens until the measure is this, and a log-rank test"
    parser.add_argument("--reach", type=float, metavar="VALUE", help=level)
    measure = "held-out measure to report (default: the study's)"
    parser.add_argument("--measure", metavar="NAME", help=measure)
    report = "start nothing, report the finished runs"
    parser.add_argument("--report", action="store_true", help=report)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    study = STUDIES[options.study]
    out = options.out or ROOT / "runs" / "replication" / options.study
    seeds, measure = options.seeds or study.seeds, options.measure or study.measure
    try:
        if unknown := set(options.only or []) - set(study.arms):
            raise ValueError(f"no arm {sorted(unknown)}; the arms are {list(study.arms)}")
        arms = {n: arm for n, arm in study.arms.items() if n in (options.only or study.arms)}
        kept = any(recorded(out, n, s).is_file() for n in arms for s in range(seeds))
        if options.set and kept:
            raise ValueError(f"--set: {out.name} has kept records: expected another name of --out")
        changes = options.set + (with_hops(out, study.hops) if study.hops else [])
        failed = list[str]()
        if not options.report:
            failed = run_all(arms, out, seeds, options.parallel, changes, study.starts)
        if not options.set:
            for name, seed in itertools.product(arms, range(seeds)):
                keep(out, name, seed)
        runs = {name: _runs(out, name, seeds) for name in arms if _runs(out, name, seeds)}
        curves = {name: [curve(run, measure) for run in arm] for name, arm in runs.items()}
        if not curves:
            raise ValueError(f"no finished run in {out}")
    except ValueError as error:
        return gave_up("coppice dev replicate", error)
    text, plot = table(curves, measure), out / f"{measure}.svg"
    several = {name: seeds for name, seeds in curves.items() if len(seeds) > 1}
    if len(several) > 1:
        text += f"\n\n{against(several, study.starts)}"
        if options.reach is not None:
            text += f"\n\n{to_level(several, options.reach)}"
    text += f"\n\n{by_part(runs, study.parts)}" if study.parts else ""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{measure}.md").write_text(text + "\n")
    save(draw(curves, measure, options.study, study.ceiling), plot)
    print(f"{text}\n\nplot: {plot}")
    for name in failed:
        print(f"FAILED: {name}: see output.log in its folder", file=sys.stderr)
    return 1 if failed else 0


def _runs(out: Path, name: str, seeds: int) -> list[Path]:
    """Return the finished runs of an arm, as they are kept or in their folders."""
    both = [(out / slug(name) / f"seed{n}", recorded(out, name, n)) for n in range(seeds)]
    done = [kept if kept.is_file() else run for run, kept in both]
    return [run for run in done if run.suffix == ".gz" or (run / "summary.json").is_file()]
