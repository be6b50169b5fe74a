"""A journal's trees and nodes as data frames, for filters in SQL, for Parquet files and for
notebooks.

``nodes`` has one row per node, ``trees`` one row per tree, ``groups`` one row per place where
several candidates were sampled, ``tokens`` one row per sampled token. Every score column that the
run has becomes a column of the first three. A score that has the name of another column is called
``score_NAME``. docs/dump.md says what each column means.
"""

import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import polars as pl

from coppice.actors.environments.task_files import listed, load_tasks
from coppice.scheduler.growth.tree import FATES, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating import judged, marks
from coppice.tools.inspecting.replay import opened

NODE = {
    **dict.fromkeys("tree node parent".split(), pl.Int64),
    "kind": pl.String,
    **dict.fromkeys("step trajectory".split(), pl.Int64),
    **dict.fromkeys("chosen forced".split(), pl.Boolean),
    "finish": pl.String,
    **dict.fromkeys("tokens cached first_version last_version".split(), pl.Int64),
    **dict.fromkeys("logprob outcome_below".split(), pl.Float64),
    "judge_invalid": pl.Int64,
    **dict.fromkeys("fate mark note text".split(), pl.String),
}
"""The columns of ``nodes`` beside the scores."""
TREE = {
    "tree": pl.Int64,
    **dict.fromkeys("task split status reason".split(), pl.String),
    "version": pl.Int64,
    "age_s": pl.Float64,
    **dict.fromkeys("groups trained trained_by".split(), pl.Int64),
    "question": pl.String,
    "hops": pl.Int64,
}
"""The first columns of ``trees``."""
SUMS = ("actions", "turns", "sampled", "invalid", "judge_invalid", "spread")
"""The columns of ``trees`` that sum up its actions."""
ACTION = pl.col("kind") == "action"
TOKEN = {
    **dict.fromkeys("tree node position token".split(), pl.Int64),
    "logprob": pl.Float64,
    "version": pl.Int64,
}
"""The columns of ``tokens``."""
_MARK = re.compile(r"<[^<>\s]*>")
_LONGEST = 200
_AT_ONCE = 1000
"""The trees that are in memory as objects, which take several times the room of their rows."""
_QUESTION = re.compile(r"Question:\s*(.+)")


def nodes(journal: Journal, rows: Sequence[TreeRow]) -> pl.DataFrame:
    """Return one row per node of the trees ``rows``, with the columns of ``NODE`` and the scores,
    null where a node has none."""
    parts = (rows[first : first + _AT_ONCE] for first in range(0, max(1, len(rows)), _AT_ONCE))
    return pl.concat((_nodes(journal, part) for part in parts), how="diagonal")


def _nodes(journal: Journal, rows: Sequence[TreeRow]) -> pl.DataFrame:
    plain, scores, grown = [], [], [journal.tree(row) for row in rows]
    marked = marks.read(journal.path.parent, grown)
    for tree in grown:
        below = _outcomes(tree)
        for node in tree.nodes.values():
            versions = node.versions if node.versions is not None and len(node.versions) else None
            fates = [f"{name}: {node.notes[name]}" for name in FATES if name in node.notes]
            plain.append({name: getattr(node, name, None) for name in NODE})
            plain[-1] |= {
                "tree": tree.id,
                "node": node.id,
                "tokens": len(node.tokens),
                "first_version": None if versions is None else int(versions.min()),
                "last_version": None if versions is None else int(versions.max()),
                "logprob": None if node.logprobs is None else float(node.logprobs.sum()),
                "outcome_below": fmean(below[node.id]) if node.id in below else None,
                "judge_invalid": len(node.invalid),
                "fate": fates[0].split("\n")[0] if fates else None,
            }
            if mark := marked.get((tree.id, node.id)):
                plain[-1] |= {"mark": mark.mark, "note": mark.note}
            scores.append(node.scores)
    taken = {*NODE, *TREE, *SUMS, "candidates", "texts"}
    columns = {
        f"score_{name}" if name in taken else name: pl.Series(
            [one.get(name) for one in scores], dtype=pl.Float64
        )
        for name in sorted({name for one in scores for name in one})
    }
    return pl.DataFrame(plain, schema=NODE).with_columns(**columns)


def _outcomes(tree: Tree) -> dict[int, list[float]]:
    """The outcomes of the trajectories that went through each action, those of forced answers
    included."""
    below = defaultdict[int, list[float]](list)
    for number in {node.trajectory for node in tree.nodes.values()}:
        actions = tree.actions(number)
        for last in [node for node in actions if "outcome" in node.scores][-1:]:
            for node in actions:
                below[node.id].append(last.scores["outcome"])
    return below


def where(table: pl.DataFrame, condition: str | None) -> pl.DataFrame:
    """Return the rows that meet a condition in Polars' SQL. Raises ValueError with the reason."""
    try:
        return table.sql(f"SELECT * FROM self WHERE {condition}") if condition else table
    except pl.exceptions.PolarsError as error:
        columns = f"its columns: {', '.join(table.columns)}"
        raise ValueError(f"--where: {str(error).splitlines()[0]}; {columns}") from None


def question(prompt: str) -> str:
    """Return what a prompt asks, in one line: what follows its last "Question:", or its beginning.
    Special tokens are left out."""
    text = _MARK.sub(" ", prompt)
    prompts = _QUESTION.findall(text)
    return " ".join((prompts[-1] if prompts else text).split())[:_LONGEST]


def _hops(folder: Path) -> dict[str, int]:
    """The hops of each task in a run's task files; none if no task has more than one."""
    try:
        run = judged.process(folder)
        sources = (s for s in (run.train, run.heldout) if all(map(os.path.isfile, listed(s))))
        hops = {task.id: task.hops for source in sources for task in load_tasks(source)[0]}
    except (OSError, ValueError):  # a journal without its run, or task files that are gone
        return {}
    return hops if max(hops.values(), default=1) > 1 else {}


def trees(journal: Journal, rows: Sequence[TreeRow], below: pl.DataFrame) -> pl.DataFrame:
    """Return one row per tree of ``rows``: the columns of ``TREE`` and ``SUMS``, each score's mean,
    NAME_min and NAME_max over its actions. below: the trees' ``nodes``."""
    now, plain, hops = time.time(), [], _hops(journal.path.parent)
    prompts = dict(below.filter(pl.col("parent") == -1).select("tree", "text").rows())
    for row in rows:
        versions = [version for _, version in journal.groups(row.id)]
        by = [version for version in versions if version is not None]
        about = (row.id, row.task, row.split, row.status, row.reason or "", row.version)
        trained = (len(versions), len(by), max(by, default=None))
        gone = f", {row.reason}" if row.removed else ""
        words = question(prompts.get(row.id, "")) or row.task + gone
        plain.append((*about, now - row.time, *trained, words, hops.get(row.task)))
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
        *(pl.col(name).mean() for name in names),
    ]
    for name in names:
        ends = {f"{name}_min": pl.col(name).min(), f"{name}_max": pl.col(name).max()}
        sums += [values.alias(column) for column, values in ends.items() if column not in names]
    frame = pl.DataFrame(plain, schema=TREE, orient="row")
    of_actions = below.filter(ACTION).group_by("tree").agg(sums)
    return frame.join(of_actions, on="tree", how="left", maintain_order="left")


def groups(table: pl.DataFrame, below: pl.DataFrame) -> pl.DataFrame:
    """Return one row per group: at least two candidates of one place (docs/dump.md). table, below:
    ``trees`` and their ``nodes``."""
    names = [name for name in below.columns if name not in NODE]
    columns = [
        pl.col("step").first(),
        pl.len().cast(pl.Int64).alias("candidates"),
        pl.col("text").n_unique().cast(pl.Int64).alias("texts"),
    ]
    if "reward" in names:
        columns.append((pl.col("reward").max() - pl.col("reward").min()).alias("spread"))
    for name in names:
        ends = {"": pl.col(name).mean(), "_min": pl.col(name).min(), "_max": pl.col(name).max()}
        ends["_chosen"] = pl.col(name).filter(pl.col("chosen")).first()
        # "risk_max" may be a score itself
        free = {end: v for end, v in ends.items() if not end or f"{name}{end}" not in names}
        columns += [values.alias(f"{name}{end}") for end, values in free.items()]
    columns.append(pl.col("text").filter(pl.col("chosen")).first().alias("chosen"))
    of_place = below.filter(ACTION).group_by("tree", "parent", maintain_order=True).agg(columns)
    about = table.select("tree", "version", "question", "hops")
    return of_place.filter(pl.col("candidates") > 1).join(about, "tree", maintain_order="left")


def turns(table: pl.DataFrame, below: pl.DataFrame) -> pl.DataFrame:
    """Return the actions that a policy chose by itself, with their tree's task, version and
    question. table, below: ``trees`` and their ``nodes``."""
    about = table.select("tree", "task", "version", "question")
    return below.filter(ACTION & ~pl.col("forced")).join(about, "tree", maintain_order="left")


def tokens(journal: Journal, rows: Sequence[TreeRow]) -> pl.DataFrame:
    """Return one row per sampled token of ``rows``, with the columns of ``TOKEN``."""
    records = [
        (row.id, node.id, *token)
        for row in rows
        for node in journal.tree(row).nodes.values()
        if node.logprobs is not None and node.versions is not None
        for token in zip(
            itertools.count(), node.tokens.tolist(), node.logprobs.tolist(), node.versions.tolist()
        )
    ]
    return pl.DataFrame(records, schema=TOKEN, orient="row")


def sql(run: Path, query: str, split: str = "train") -> pl.DataFrame:
    """Return what a query in Polars' SQL gives over the tables trees, groups, nodes, turns and
    tokens. Raises FileNotFoundError, or ValueError with the reason."""
    table, below = read(run, split)
    tables = {"trees": table, "groups": groups(table, below), "nodes": below}
    tables["turns"] = turns(table, below)
    if re.search(r"\btokens\b", query):
        with opened(run) as journal:
            tables["tokens"] = tokens(journal, journal.trees("split=?", split))
    try:
        return pl.SQLContext(tables, eager=True).execute(query)
    except pl.exceptions.PolarsError as error:
        columns = "; ".join(f"{name}: {', '.join(of.columns)}" for name, of in tables.items())
        raise ValueError(f"{str(error).splitlines()[0]}; the tables: {columns}") from None


def read(run: Path, split: str = "train") -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return ``trees`` and ``nodes`` of a run folder, which may be live, or of a journal file.
    Raises FileNotFoundError."""
    with opened(run) as journal:
        rows = journal.trees("split=?", split)
        below = nodes(journal, rows)
        return trees(journal, rows, below), below
