"""A run in a notebook: trees as data frames, other schemes and plots. docs/notebook.md has the
examples."""

from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from coppice.tools.inspecting import frames, replay, report, runs


class OpenedRun:
    """A run folder. trees, nodes: the columns of docs/dump.md. split: train, or heldout. What is
    read stays as it was then: open the run again for what a live run has added. Raises
    FileNotFoundError if there is no journal."""

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder, self.split = Path(folder), split
        self.trees, self.nodes = frames.read(self.folder, split)

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
        with frames.opened(self.folder) as journal:
            rows = journal.trees("split=?", self.split)
            values = replay.advantages(journal, rows, own, scheme, **options)
        columns = [(tree, node, value) for (tree, node), value in sorted(values.items())]
        return pl.DataFrame(columns, ["tree", "node", "advantage"], orient="row")

    def sql(self, query: str) -> pl.DataFrame:
        """Return what a query over trees, groups, nodes, turns and tokens gives (docs/dump.md).
        Raises ValueError."""
        return frames.sql(self.folder, query, self.split)

    def plot(self, *metrics: str) -> Figure:
        """Return a figure of metrics over updates, which a notebook shows; ``.savefig(path)``
        writes it. Raises ValueError for a metric that the run has not recorded."""
        run = runs.read(self.folder)
        runs.check_metrics([run], metrics)
        return report.picture(runs.grouped([run]), metrics=metrics)


def newest(runs: str | Path = "runs") -> OpenedRun:
    """Open the run below ``runs`` that began last. Raises FileNotFoundError if there is none."""
    folders = [journal.parent for journal in Path(runs).glob("*/journal.sqlite")]
    if not folders:
        raise FileNotFoundError(f"no run is below {Path(runs).resolve()}: expected run folders")
    return OpenedRun(max(folders, key=lambda run: (run / "config.json").stat().st_mtime))
