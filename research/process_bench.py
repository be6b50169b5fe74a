"""The command coppice dev process-bench: build a benchmark of process judges from labelled
trajectories: filter, threshold, label, balance (methods.md 2.5; PPR, A.4).

Nothing is dropped silently: the report counts the dropped trajectories by reason.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.options import command_parser
from coppice.tools.evaluating.judge_bench import record
from coppice.tools.evaluating.judge_bench.evaluate import check_threshold
from coppice.tools.evaluating.judge_bench.record import (
    CATEGORIES,
    THRESHOLD,
    Graded,
    Item,
    Labelled,
    Trajectory,
)
from coppice.tools.finetuning.command import check_files, say


class BenchReport(msgspec.Struct, frozen=True):
    """What happened to the trajectories. mean_score: over the steps left after filtering;
    threshold: the one used for the labels.

    pool, taken: items by category, before and after balancing. missing: items that the pool could
    not provide.
    """

    trajectories: int
    dropped: dict[str, int]
    mean_score: float
    threshold: float
    pool: dict[str, int]
    taken: dict[str, int]
    multi_step: int
    steps: int
    good_steps: int
    missing: int


def build(
    labelled: Sequence[Trajectory[Labelled]], size: int, threshold: float | None, seed: int = 0,
    exclude: Sequence[Trajectory[Labelled]] = (),
) -> tuple[list[Item], BenchReport]:  # fmt: skip
    """Choose at most ``size`` items, with categories as even as the pool allows. Items of several
    steps are preferred.

    threshold: None means the pool's mean step score, as in the paper. exclude: records whose ids
    and questions are kept out, because different runs answer a question much alike. Raises
    ValueError if no trajectory is left.
    """
    pool, dropped = _filtered(labelled, exclude)
    if not pool:
        raise ValueError(f"no trajectory is left for the benchmark; dropped: {dict(dropped)}")
    scores = [step.score for one in pool for step in one.steps]
    mean = sum(scores) / len(scores)
    limit = mean if threshold is None else threshold
    items = [_item(one, limit) for one in pool]
    random.Random(seed).shuffle(items)
    items.sort(key=lambda item: len(item.steps) == 1)
    by_category = {name: [item for item in items if item.category == name] for name in CATEGORIES}
    shares = even(size, [len(members) for members in by_category.values()])
    sizes = dict(zip(by_category, shares, strict=True))
    taken = {name: members[: sizes[name]] for name, members in by_category.items()}
    chosen = [item for members in taken.values() for item in members]
    chosen.sort(key=lambda item: item.id)
    if surplus := len(items) - len(chosen):
        dropped["not needed for the balance"] = surplus
    return chosen, BenchReport(
        len(labelled), dict(dropped), mean, limit,
        {name: len(members) for name, members in by_category.items()},
        {name: len(members) for name, members in taken.items()},
        sum(len(item.steps) > 1 for item in chosen), sum(len(item.steps) for item in chosen),
        sum(step.label for item in chosen for step in item.steps), size - len(chosen),
    )  # fmt: skip


def _filtered(
    labelled: Sequence[Trajectory[Labelled]], exclude: Sequence[Trajectory[Labelled]]
) -> tuple[list[Trajectory[Labelled]], Counter[str]]:
    ids, questions = {one.id for one in exclude}, {one.question for one in exclude}
    seen: set[tuple[str, ...]] = set()
    kept, dropped = [], Counter[str]()
    for one in labelled:
        key = (one.question, *(step.response for step in one.steps))
        if one.id in ids or one.question in questions:
            dropped["id or question is in the excluded file"] += 1
        elif not [gold for gold in one.golden_answers if gold.strip()]:
            dropped["no gold answer"] += 1
        elif key in seen:
            dropped["the same question and steps as another"] += 1
        else:
            seen.add(key)
            kept.append(one)
    return kept, dropped


def _item(one: Trajectory[Labelled], limit: float) -> Item:
    steps = [
        record.copied(step, Graded, label=record.label(step.score, limit)) for step in one.steps
    ]
    kind = record.category(one.outcome, [step.score for step in steps], limit)
    return record.copied(one, Item, steps=steps, category=kind)


def even(size: int, available: Sequence[int]) -> list[int]:
    """Divide ``size`` as evenly as ``available`` allows. A category that has too little gives all;
    the others share the rest."""
    shares = [0] * len(available)
    while sum(shares) < size and shares != list(available):
        open_ = [i for i, share in enumerate(shares) if share < available[i]]
        lowest = min(shares[i] for i in open_)
        shares[next(i for i in open_ if shares[i] == lowest)] += 1
    return shares


EXAMPLES = """\
  coppice dev process-bench corrected.jsonl --size 100 --out bench.jsonl
  coppice dev process-bench corrected.jsonl --size 100 --exclude train.jsonl --out bench.jsonl"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev process-bench."""
    parser = command_parser(
        "coppice dev process-bench", "Build a balanced benchmark of process judges.", EXAMPLES
    )
    add = parser.add_argument
    add("labelled", nargs="+", type=Path, help="labelled or corrected trajectories (coppice sft)")
    add("--out", required=True, type=Path, help="the records; a report is written beside them")
    add("--size", required=True, type=int, help="trajectories in the benchmark")
    threshold = "good scores exceed it: a number, or mean (default: %(default)s)"
    add("--threshold", default=str(THRESHOLD), help=threshold)
    add("--seed", type=int, default=0, help="of every random draw (default: 0)")
    excluded = "leave out these labelled trajectories and all others of their questions; repeatable"
    add("--exclude", type=Path, action="append", default=[], help=excluded)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        _write(options)
    except (OSError, ValueError) as error:
        print(f"coppice dev process-bench: {error}", file=sys.stderr)
        return 2
    return 0


def _write(options: argparse.Namespace) -> None:
    out: Path = options.out
    report_path = out.parent / f"{out.name.removesuffix('.jsonl')}.report.json"
    written = [("--out", out), ("--out with its report", report_path)]
    check_files(written, [*options.labelled, *options.exclude])
    if options.size < 1:
        raise ValueError(f"--size {options.size}: expected 1 trajectory or more")
    pool = record.read_all(options.labelled, Trajectory[Labelled])
    excluded = [
        one
        for path in options.exclude
        for one in record.read(path, Trajectory[Labelled], "--exclude")
    ]
    threshold = None if options.threshold == "mean" else _number(options.threshold)
    items, report = build(pool, options.size, threshold, options.seed, excluded)
    record.write(out, items)
    write_whole(report_path, report)
    print(f"{len(items)} trajectories in {out}, {report.multi_step} of several steps;", end=" ")
    print(f"{report.good_steps} of {report.steps} steps are good")
    for heading, counts in (("taken", report.taken), ("in the pool", report.pool)):
        say(heading, counts)
    say("dropped", report.dropped)
    if report.missing:
        print(f"the pool has {report.missing} fewer than asked for")
    print(f"report {report_path}")


def _number(text: str) -> float:
    try:
        threshold = float(text)
    except ValueError:
        raise ValueError(f"--threshold {text}: expected a number from 0 to 1, or mean") from None
    check_threshold(threshold)
    return threshold
