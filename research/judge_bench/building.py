"""Builds a benchmark of process judges from labelled trajectories: filter, threshold, label,
balance (methods.md 2.5; PPR, A.4). Nothing is dropped silently: the report counts the dropped
trajectories by reason."""

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.numbers import Count
from coppice.tools.finetuning import records
from coppice.tools.finetuning.command import check_files, say
from coppice.tools.finetuning.records import THRESHOLD, Labelled, Trajectory, copied, label

CATEGORIES = ("correct_good", "correct_bad", "wrong_good", "wrong_bad")
"""The outcome, and whether the mean step score is above the threshold."""


class GradedStep(Labelled, frozen=True, kw_only=True):
    """A turn of the benchmark. label: 1 if the score is above the threshold."""

    label: Literal[0, 1]


class Item(Trajectory[GradedStep], frozen=True, kw_only=True):
    """A trajectory of the benchmark."""

    category: Literal["correct_good", "correct_bad", "wrong_good", "wrong_bad"]


class BenchReport(msgspec.Struct, frozen=True):
    """What happened to the trajectories. threshold: the one used for the labels. pool, taken: items
    by category, before and after balancing."""

    dropped: dict[str, int]
    threshold: float
    pool: dict[str, int]
    taken: dict[str, int]
    multi_step: int
    steps: int
    good_steps: int


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
    limit = sum(scores) / len(scores) if threshold is None else threshold
    items = [_item(one, limit) for one in pool]
    random.Random(seed).shuffle(items)
    items.sort(key=lambda item: len(item.steps) == 1)
    by_category = [[item for item in items if item.category == name] for name in CATEGORIES]
    shares = even(size, list(map(len, by_category)))
    taken = (own[:share] for own, share in zip(by_category, shares, strict=True))
    chosen = sorted((item for own in taken for item in own), key=lambda item: item.id)
    if surplus := len(items) - len(chosen):
        dropped["not needed for the balance"] = surplus
    return chosen, BenchReport(
        dict(dropped), limit, dict(zip(CATEGORIES, map(len, by_category), strict=True)),
        dict(zip(CATEGORIES, shares, strict=True)), sum(len(item.steps) > 1 for item in chosen),
        sum(len(item.steps) for item in chosen),
        sum(step.label for item in chosen for step in item.steps),
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
        copied(step, GradedStep, label=label(step.score, limit), target="") for step in one.steps
    ]
    kind = category(one.outcome, [step.score for step in steps], limit)
    return copied(one, Item, steps=steps, category=kind)


def category(outcome: int, scores: Sequence[float], threshold: float) -> str:
    """One of ``CATEGORIES``, from the outcome and from the label of the mean step score."""
    good = label(sum(scores) / len(scores), threshold)
    return f"{'correct' if outcome else 'wrong'}_{'good' if good else 'bad'}"


def even(size: int, available: Sequence[int]) -> list[int]:
    """Divide ``size`` as evenly as ``available`` allows. A category that has too little gives all;
    the others share the rest."""
    shares = [0] * len(available)
    for _ in range(min(size, sum(available))):
        open_ = [i for i, most in enumerate(available) if shares[i] < most]
        shares[min(open_, key=shares.__getitem__)] += 1
    return shares


def _threshold(text: str) -> float | None:
    return None if text == "mean" else float(text)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of coppice dev judge-bench build."""
    add = parser.add_argument
    add("labelled", nargs="+", type=Path, help="labelled trajectories (coppice sft)")
    add("--out", required=True, type=Path, help="the records; a report is written beside them")
    add("--size", required=True, type=Count, help="trajectories in the benchmark")
    threshold = "good scores exceed it: a number, or mean (default: %(default)s)"
    add("--threshold", type=_threshold, default=THRESHOLD, help=threshold)
    add("--seed", type=int, default=0, help="of every random draw (default: 0)")
    excluded = "leave out these labelled trajectories and all others of their questions; repeatable"
    add("--exclude", type=Path, action="append", default=[], help=excluded)


def write(flags: argparse.Namespace) -> None:
    """Build the benchmark of a command line. Raises ValueError or OSError with the remedy."""
    out: Path = flags.out
    report_path = out.parent / f"{out.name.removesuffix('.jsonl')}.report.json"
    check_files(out, [*flags.labelled, *flags.exclude], [report_path])
    pool = records.read(flags.labelled, Trajectory[Labelled])
    excluded = [
        one
        for path in flags.exclude
        for one in records.read([path], Trajectory[Labelled], "--exclude")
    ]
    items, report = build(pool, flags.size, flags.threshold, flags.seed, excluded)
    records.write(out, items)
    write_whole(report_path, report)
    print(f"{len(items)} trajectories in {out}, {report.multi_step} of several steps;", end=" ")
    print(f"{report.good_steps} of {report.steps} steps are good")
    for heading in ("taken", "pool", "dropped"):
        say(heading, getattr(report, heading))
    if missing := flags.size - len(items):
        print(f"the pool has {missing} fewer than asked for")
    print(f"report {report_path}")
