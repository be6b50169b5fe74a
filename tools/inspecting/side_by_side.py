"""Two runs on the questions that both have, and two trees with their candidates side by side."""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from coppice.scheduler.evaluation.evaluation import estimate
from coppice.tools.inspecting import drawing, frames

KEY, SHOWN = ["task", "question"], "change outcome outcome_other tree tree_other question".split()


def joined(run: Path, other: Path, condition: str | None) -> tuple[pl.DataFrame, str]:
    """Return one row per question with an outcome in both runs, of held-out questions if they share
    any: the columns of ``frames.trees`` of its newest tree in each that meets ``condition``, the
    second with the suffix "_other", and ``change``, that of the outcome, the largest first; and
    what a person would say of it. Raises ValueError without a question."""
    for split in ("heldout", "train"):
        first, second = (_newest(one, split, condition) for one in (run, other))
        both = first.join(second, KEY, suffix="_other", maintain_order="left")
        if not both.is_empty():
            break
    else:
        raise ValueError(f"--diff: {run} and {other} share no question with outcomes that matches")
    both = both.with_columns(change=pl.col("outcome_other") - pl.col("outcome"))
    means = (str(estimate(both[name].to_list())) for name in ("outcome", "outcome_other", "change"))
    rose, fell = (len(both.filter(pl.col("change").sign() == sign)) for sign in (1, -1))
    said = "{} questions of both: outcome {} and {}, change {}".format(len(both), *means)
    said += f"\n{rose} rose, {fell} fell, {len(both) - rose - fell} did not change"
    return both.sort(pl.col("change").abs(), descending=True, maintain_order=True), said


def _newest(run: Path, split: str, condition: str | None) -> pl.DataFrame:
    trees, nodes = frames.read(run, split)
    begun = nodes.filter(frames.ACTION & (pl.col("step") == 1)).group_by("tree")
    outcomes = begun.agg(outcome=pl.col("outcome_below").mean())
    trees = trees.drop("outcome", strict=False).join(outcomes, "tree", maintain_order="left")
    ended = frames.where(trees, condition).drop_nulls("outcome")
    return ended.unique(KEY, keep="last", maintain_order=True)


def aligned_steps(trees: Sequence[tuple[Path, int | str]], width: int) -> str:
    """Return the candidates of two trees of run folders, step by step. Raises ValueError if there
    is no such tree."""
    half, sides, names = (width - 3) // 2, list[dict[int, list[str]]](), ["outcome_below"]
    for run, tree in trees:
        with frames.opened(run) as journal:
            if not (rows := journal.trees("id=?", tree)) or rows[0].removed:
                why = rows[0].reason if rows else "no such tree, expected its number"
                raise ValueError(f"--diff {tree}: {run}: {why}")
            own = frames.nodes(journal, rows)
        if own.is_empty():
            raise ValueError(f"--diff {tree}: {run}: it has no nodes yet; choose another tree")
        title = f"{run.name}, tree {tree}, version {rows[0].version}"
        names = [name for name in ("reward", *names[-1:]) if name in own.columns]
        steps = own.filter(frames.ACTION).partition_by("step", as_dict=True).items()
        drawn = {key[0]: drawing.candidates(one.to_dicts(), names, half) for key, one in steps}
        question = textwrap.wrap(frames.question(own["text"][0]), half)
        sides.append({0: [title, *question], **drawn})
    lines = []
    for step in sorted(set().union(*sides)):
        lines += [f"step {step}: {', '.join(names)}"] if step else []
        pairs = itertools.zip_longest(*(side.get(step, []) for side in sides), fillvalue="")
        lines += [f"{left[:half]:<{half}} | {right}".rstrip() for left, right in pairs]
    return "\n".join(lines)
