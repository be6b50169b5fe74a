"""Build a benchmark from labelled trajectories: filter, threshold, label, balance (methods.md 2.5;
PPR, A.4).

Nothing is dropped silently: the report counts the dropped trajectories by reason.
"""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from coppice.tools.evaluating.judge_bench import record
from coppice.tools.evaluating.judge_bench.record import (
    CATEGORIES,
    Graded,
    Item,
    Labelled,
    Trajectory,
)


class Report(msgspec.Struct, frozen=True):
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
    labelled: Sequence[Trajectory[Labelled]],
    size: int,
    threshold: float | None,
    seed: int = 0,
    exclude: Sequence[Trajectory[Labelled]] = (),
) -> tuple[list[Item], Report]:
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
    return chosen, Report(
        len(labelled), dict(dropped), mean, limit,
        {name: len(members) for name, members in by_category.items()},
        {name: len(members) for name, members in taken.items()},
        sum(len(item.steps) > 1 for item in chosen),
        sum(len(item.steps) for item in chosen),
        sum(step.label for item in chosen for step in item.steps),
        size - len(chosen),
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
