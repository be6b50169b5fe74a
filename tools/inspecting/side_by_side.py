"""Two runs on the questions that both have, and two trees with their candidates side by side."""

import itertools
from pathlib import Path

import polars as pl

from coppice.scheduler.evaluation.evaluation import estimate
from coppice.tools.inspecting import drawing, frames

KEY = ["task", "question"]


def joined(run: Path, other: Path, condition: str | None) -> pl.DataFrame:
    """Return one row per question with an outcome in both runs, of held-out questions if they share
    any: the columns of ``frames.trees`` of its newest tree in each that meets ``condition``, the
    second with the suffix "_other"; and ``change``, that of the outcome. The largest changes come
    first. Raises ValueError without one."""
    for split in ("heldout", "train"):
        first, second = (_newest(one, split, condition) for one in (run, other))
        both = first.join(second, KEY, suffix="_other", maintain_order="left")
        if not both.is_empty():
            change = pl.col("outcome_other") - pl.col("outcome")
            order = {"descending": True, "maintain_order": True}
            return both.with_columns(change=change).sort(change.abs(), **order)
    raise ValueError(f"--diff: {run} and {other} share no question with outcomes that matches")


def _newest(run: Path, split: str, condition: str | None) -> pl.DataFrame:
    trees, nodes = frames.read(run, split)
    begun = nodes.filter(frames.ACTION & (pl.col("step") == 1)).group_by("tree")
    outcomes = begun.agg(pl.col("outcome_below").mean().alias("outcome"))
    trees = trees.drop("outcome", strict=False).join(outcomes, "tree", maintain_order="left")
    known = frames.where(trees, condition).drop_nulls("outcome")
    return known.unique(KEY, keep="last", maintain_order=True)


def summary(both: pl.DataFrame) -> str:
    """Return what is said of ``joined``: means, and how many questions rose and fell."""
    means = (str(estimate(both[name].to_list())) for name in ("outcome", "outcome_other", "change"))
    rose, fell = (both["change"] > 0).sum(), (both["change"] < 0).sum()
    said = "{} questions of both runs: outcome {} and {}, change {}".format(len(both), *means)
    return f"{said}\n{rose} rose, {fell} fell, {len(both) - rose - fell} did not change"


def beside(places: list[tuple[str, pl.DataFrame]], width: int) -> str:
    """Return the candidates of two trees, step by step. places: titles, ``frames.nodes``."""
    half, sides = (width - 3) // 2, list[dict[int, list[str]]]()
    for title, nodes in places:
        own = nodes.filter(frames.ACTION)
        names = [name for name in ("reward", "outcome_below") if name in own.columns]
        steps = own.partition_by("step", as_dict=True, maintain_order=True).items()
        drawn = {key[0]: drawing.candidates(one.to_dicts(), names, half) for key, one in steps}
        sides.append({0: [title[:half]], **drawn})
    lines = []
    for step in sorted(set().union(*sides)):
        lines += [f"step {step}, {', '.join(names)}"] if step else []
        pairs = itertools.zip_longest(*(side.get(step, []) for side in sides), fillvalue="")
        lines += [f"{left:<{half}} | {right}".rstrip() for left, right in pairs]
    return "\n".join(lines)
