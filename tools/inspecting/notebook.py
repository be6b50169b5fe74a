"""A run in a notebook: trees as data frames, other schemes and corrections, judges and plots.
docs/notebook.md has the examples."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from coppice.judges.base import Judge, checked
from coppice.judges.serve import make_worker
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating import judged
from coppice.tools.inspecting import frames, replay, runs, sections


class OpenedRun:
    """A run folder. trees, nodes: the columns of docs/dump.md. split: train, or heldout. What is
    read stays as it was then: open the run again for what a live run has added. Raises
    FileNotFoundError if there is no journal."""

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder, self.split = Path(folder), split
        self.trees, self.nodes = frames.read(self.folder, split)

    @contextlib.contextmanager
    def journal(self) -> Iterator[tuple[Journal, list[TreeRow]]]:
        """The run's journal, and the rows of its trees."""
        with contextlib.closing(frames.opened(self.folder)) as journal:
            yield journal, journal.trees("split=?", self.split)

    @cached_property
    def records(self) -> pl.DataFrame:
        """The metrics of each update (docs/metrics.md), null where an update has none."""
        return pl.DataFrame(runs.read(self.folder).records, infer_schema_length=None)

    def advantages(self, scheme: str = "", **options: Any) -> pl.DataFrame:
        """Return tree, node and ``advantage`` of every turn under a scheme with its options, "" for
        the run's own; all trees are one batch.

        Raises ValueError for a scheme that reads what the journal lacks, or for a wrong option.
        """
        own = replay.learner(self.folder).learner
        with self.journal() as (journal, rows):
            values = replay.advantages(journal, rows, own, scheme, **options)
        return _by_place(advantage=values)

    def weights(self, correction: str, level: str = "token", **options: Any) -> pl.DataFrame:
        """Return tree, node, ``ratio`` and ``weight`` of every turn, if the newest policy trained
        on it now with an advantage of 1.

        ratio: the geometric mean of the tokens' probability ratios, newest over sampling policy.
        weight: the mean over its tokens of what the correction multiplies the gradient of their
        log-probabilities with; 1 without a correction. level: "token" or "turn", over which the
        correction takes its ratio. Loads the policy.
        """
        import torch  # takes seconds

        from coppice.learner.update import corrections

        if level not in ("token", "turn"):
            raise ValueError(f"level = {level!r}: expected token or turn")
        of = corrections.load(correction, options | {"level": level})
        with self.journal() as (journal, rows):
            _, newest = replay.newest(journal, rows, self.folder)
            table, places = replay.turns(journal, rows)
        ratios, weights = {}, {}
        for place, turn in zip(places, table.paths, strict=True):
            current, behaviour = (
                torch.as_tensor(np.array(one)) for one in (newest[place], turn.logprobs)
            )
            size = len(turn.sampled)
            ids, lengths = torch.zeros(size, dtype=torch.long), torch.full((1,), float(size))
            segments = {level: corrections.Segments(ids, torch.zeros(1), lengths)}
            logprobs = corrections.Logprobs(current, current, behaviour, segments)
            ratios[place] = float((current - behaviour).mean().exp())
            weights[place] = float(of(logprobs, torch.ones(size)).coefficient.mean())
        return _by_place(ratio=ratios, weight=weights)

    def judge(self, judge: str, tree: int, **settings: Any) -> pl.DataFrame:
        """Return the scores that a judge gives each action of a tree now: node, chosen, and the
        judge's columns, null where it gives none.

        judge: a built-in name or "module:Class"; settings: its options, as in [judges.use]. Raises
        ValueError for a tree, a task or an option that is not there, and what the judge raises.
        """
        worker = make_worker(judge, settings)
        if not isinstance(worker, Judge):
            raise ValueError(f"judge {judge!r}: expected a judge, not an opponent or a speaker")
        with self.journal() as (journal, rows):
            row = next((row for row in rows if row.id == tree), None)
            if row is None:
                raise ValueError(f"tree = {tree}: the journal has no such {self.split} tree")
            turns = judged.turns(self.folder, row, journal.tree(row))
        with ThreadPoolExecutor(1) as other:  # a notebook's own event loop is running
            scores = _scored(worker, [turn for _, turn in turns])
            scored = other.submit(asyncio.run, scores).result()
        nodes = {"node": [n.id for n, _ in turns], "chosen": [n.chosen for n, _ in turns]}
        columns = {name: [one.get(name) for one in scored] for name in worker.columns}
        return pl.DataFrame(nodes | columns)

    def plot(self, *metrics: str) -> Figure:
        """Return a figure of metrics over updates, which a notebook shows; ``.savefig(path)``
        writes it. Raises ValueError for a metric that the run has not recorded."""
        run = runs.read(self.folder)
        runs.check_metrics([run], metrics)
        return sections.picture(runs.grouped([run]), metrics=metrics)


def newest(runs: str | Path = "runs") -> OpenedRun:
    """Open the run below ``runs`` that began last. Raises FileNotFoundError if there is none."""
    folders = [journal.parent for journal in Path(runs).glob("*/journal.sqlite")]
    if not folders:
        raise FileNotFoundError(f"no run is below {Path(runs).resolve()}: expected run folders")
    return OpenedRun(max(folders, key=lambda run: (run / "config.json").stat().st_mtime))


def _by_place(**columns: dict[tuple[int, int], float]) -> pl.DataFrame:
    places = sorted(next(iter(columns.values())))
    values = {name: [column[place] for place in places] for name, column in columns.items()}
    return pl.DataFrame({"tree": [t for t, _ in places], "node": [n for _, n in places], **values})


async def _scored(judge: Judge, turns: list[Any]) -> list[dict[str, float]]:
    await judge.start()
    try:
        scores: list[dict[str, float]] = []
        for start in range(0, len(turns), judge.batch):
            part = turns[start : start + judge.batch]
            judgements, _ = checked(judge, part, await judge.score(part))
            scores += [judgement.scores for judgement in judgements]
        return scores
    finally:
        await judge.close()
