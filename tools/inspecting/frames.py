"""A journal's trees and nodes as data frames, for filters in SQL, for Parquet files and for
notebooks.

``nodes`` has one row per node and ``trees`` one row per tree. Every score column that the run has
becomes a column of both. A score that has the name of another column is called ``score_NAME``.
"""

import contextlib
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from coppice.common import shards
from coppice.scheduler.growth.tree import FATES
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.inspecting.replay import Replayed

Types = dict[str, pl.DataType | type[pl.DataType]]
NODE: Types = {
    **dict.fromkeys(("tree", "node", "parent"), pl.Int64), "kind": pl.String,
    **dict.fromkeys(("step", "trajectory"), pl.Int64),
    **dict.fromkeys(("chosen", "forced"), pl.Boolean), "finish": pl.String,
    **dict.fromkeys(("tokens", "cached", "first_version", "last_version"), pl.Int64),
    "logprob": pl.Float64, "judge_invalid": pl.Int64, "fate": pl.String, "text": pl.String,
}  # fmt: skip
"""The columns of ``nodes`` beside the scores. parent: -1 for the root. kind: prompt, action or
observation. tokens: those that the node adds. cached: prompt tokens that the engine had in its
cache. first_version, last_version: the weights that sampled an action. logprob: the sum over an
action's tokens under the policy that sampled them. judge_invalid: how many score columns a judge
could not give. fate: what ended the episode other than its rules ("crashed: exit status 1: ..."),
on its last action."""
TREE: Types = {
    "tree": pl.Int64, **dict.fromkeys(("task", "split", "status", "reason"), pl.String),
    "version": pl.Int64, "age_s": pl.Float64,
    **dict.fromkeys(("groups", "trained", "trained_by"), pl.Int64),
}  # fmt: skip
"""The first columns of ``trees``. version: the one at which the tree was admitted. age_s: seconds
since then. groups: how many it emitted; trained: how many of them a version has trained, the newest
of which is trained_by."""
SUMS = ("actions", "turns", "sampled", "invalid", "judge_invalid", "spread")
"""The columns of ``trees`` that sum up its actions. actions: all candidates; turns: those that were
continued, forced ones included; sampled: their tokens; invalid: how many could not be read;
judge_invalid: how many scores a judge could not give; spread: the largest reward less the
smallest."""
ACTION = pl.col("kind") == "action"
TRACE = "trace.jsonl"
"""The calls of a run, beside its journal."""
RANKS = {
    "best": ("outcome", "reward", "step_reward"),
    "worst": ("outcome", "reward", "step_reward"),
    "surprising": ("advantage", "reward", "outcome"),
}
"""The columns by which trees are ranked: by the first that the run has, then by the next."""


def nodes(journal: Journal, rows: Sequence[TreeRow]) -> pl.DataFrame:
    """Return one row per node of the trees ``rows``, with the columns of ``NODE`` and the scores,
    null where a node has none."""
    plain, scores = [], []
    for row in rows:
        for node in journal.tree(row).nodes.values():
            versions = node.versions if node.versions is not None and len(node.versions) else None
            span = (None, None) if versions is None else (int(versions.min()), int(versions.max()))
            logprob = None if node.logprobs is None else float(node.logprobs.sum())
            crashed = [f"{name}: {node.notes[name]}" for name in FATES if name in node.notes]
            plain.append((
                row.id, node.id, node.parent, node.kind, node.step, node.trajectory, node.chosen,
                node.forced, node.finish, len(node.tokens), node.cached, *span, logprob,
                len(node.invalid), crashed[0].split("\n")[0] if crashed else None, node.text,
            ))  # fmt: skip
            scores.append(node.scores)
    names = sorted({name for one in scores for name in one})
    taken = {*NODE, *TREE, *SUMS}
    columns = {
        f"score_{name}" if name in taken else name: _floats([one.get(name) for one in scores])
        for name in names
    }
    return pl.DataFrame(plain, schema=NODE, orient="row").with_columns(**columns)


def _floats(values: Sequence[float | None]) -> pl.Series:
    return pl.Series(values, dtype=pl.Float64)


def trees(journal: Journal, rows: Sequence[TreeRow], below: pl.DataFrame) -> pl.DataFrame:
    """Return one row per tree of ``rows``: the columns of ``TREE`` and ``SUMS``, and each score's
    mean, NAME_min and NAME_max over its actions.

    below: the trees' ``nodes``.
    """
    now = time.time()
    plain = []
    for row in rows:
        versions = [version for _, version in journal.groups(row.id)]
        known = [version for version in versions if version is not None]
        what = (row.id, row.task, row.split, row.status, row.reason or "", row.version)
        trained = (len(versions), len(known), max(known, default=None))
        plain.append((*what, now - row.time, *trained))
    names = [name for name in below.columns if name not in NODE]
    unread = (pl.col("valid") == 0).sum() if "valid" in names else pl.lit(0)
    reward = pl.col("reward") if "reward" in names else pl.lit(None, pl.Float64)
    sums = [
        pl.len().cast(pl.Int64).alias("actions"),
        pl.col("chosen").sum().cast(pl.Int64).alias("turns"),
        pl.col("tokens").sum().alias("sampled"),
        unread.cast(pl.Int64).alias("invalid"),
        pl.col("judge_invalid").sum(),
        (reward.max() - reward.min()).alias("spread"),
    ]
    sums += [pl.col(name).mean() for name in names]
    sums += [
        getattr(pl.col(name), end)().alias(f"{name}_{end}")
        for name in names
        for end in ("min", "max")
        if f"{name}_{end}" not in names
    ]
    frame = pl.DataFrame(plain, schema=TREE, orient="row")
    of_actions = below.filter(ACTION).group_by("tree").agg(sums)
    for more in (of_actions, seconds(journal.path.parent)):
        frame = frame.join(more, on="tree", how="left", maintain_order="left")
    return frame


def calls(values: Mapping[str, Any]) -> list[str]:
    """Return how long a tree's calls took, in words. values: its row of ``trees``."""
    kinds = [name for name in values if name.endswith("_s") and name not in TREE]
    return [f"{name[:-2]} {values[name]:.1f} s" for name in kinds if values[name]]


def traced(home: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a scheduler's trace but one that a crash cut off. Raises OSError."""
    with (home / TRACE).open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line.rstrip(b",\n"))


def tree_of(args: Mapping[str, Any]) -> int | None:
    """Return the tree that waited for a call, from the ``args`` of its line in the trace."""
    known = re.match(r"tree (\d+)", args.get("for", ""))
    return int(known[1]) if known else None


def seconds(run: Path) -> pl.DataFrame:
    """Return, for each tree of a run, the seconds that its calls of each kind took, their waiting
    for a worker not counted: generate_s, judge_s, ... A run of an earlier release did not record
    for whom a call was."""
    sums: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    homes = [home for home in shards.homes(run) if (home / TRACE).is_file()]
    for row in itertools.chain.from_iterable(map(traced, homes)):
        if (tree := tree_of(row.get("args", {}))) is not None:
            sums[f"{row['name'].partition('.')[0]}_s"][tree] += row["dur"] / 1e6
    known = sorted({tree for kind in sums.values() for tree in kind})
    columns = {kind: _floats([sums[kind].get(tree) for tree in known]) for kind in sorted(sums)}
    return pl.DataFrame({"tree": pl.Series(known, dtype=pl.Int64), **columns})


def ranked(table: pl.DataFrame, rank: str) -> pl.DataFrame:
    """Return the ``trees`` in the order of a rank of ``RANKS``: the highest first, or the lowest
    for "worst". The rank's later columns decide between equal trees. Raises ValueError if the run
    has none of the columns."""
    names = [name for name in RANKS[rank] if name in table.columns]
    if not names:
        raise ValueError(
            f"{rank}: the run has none of the columns {', '.join(RANKS[rank])}; use --sort COLUMN"
        )
    values = [pl.col(name) for name in names]
    if rank == "surprising":
        ends = [pl.col(f"{names[0]}_{end}").abs() for end in ("max", "min")]
        values = [pl.max_horizontal(*ends)]
    return table.sort(values, descending=rank != "worst", nulls_last=True, maintain_order=True)


def read(run: Path, split: str = "train") -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return ``trees`` and ``nodes`` of a run folder, which may be live, or of a journal file.
    Raises FileNotFoundError."""
    with contextlib.closing(opened(run)) as journal:
        rows = journal.trees("split=?", split)
        below = nodes(journal, rows)
        return trees(journal, rows, below), below


def opened(run: Path) -> Journal:
    """Return the journals of a run folder as one, or the journal file itself, open for reading,
    with advantages. Raises FileNotFoundError."""
    homes = shards.homes(run) if run.is_dir() else []
    first, *others = [home / "journal.sqlite" for home in homes] or [run]
    return Replayed(first, [path for path in others if path.is_file()])
