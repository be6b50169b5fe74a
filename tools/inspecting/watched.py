"""What coppice watch shows of a run, as plain text: its status, curves, newest trees and processes.

Nothing here raises for what is missing, torn or damaged; the status says it in words
(tools/launching/status.py).
"""

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.ledger.records import Reader
from coppice.scheduler.telemetry import health
from coppice.tools.evaluating.examination import table
from coppice.tools.inspecting import frames
from coppice.tools.launching import status
from coppice.tools.launching.screen import COLUMNS
from coppice.tools.launching.status import Status, ago, span

CURVES = "reward outcome process valid judged engine learner cache tok/s stale".split()
"""The columns of the terminal's table that are drawn, if the run has them. engine, learner: busy
shares; cache: prompt tokens that the prefix cache served."""
ENDED, GROWING = 16, 8
"""The newest trees that are listed."""
TAIL_BYTES = 2**24
"""How much of a long metrics.jsonl is read at first: the newest 4,000 updates or so."""
TREES = ("tree", "status", "from", "trained", "actions", "reward", "outcome", "task")
PROCESSES = ("process", "pid", "state", "age", "restarts", "memory", "heard", "calls")

Rows = list[tuple[str, ...]]


class Look(msgspec.Struct, frozen=True):
    """A run at one moment. records: of the updates, in order. trees, processes: rows of the tables,
    with the columns of ``TREES`` and ``PROCESSES``."""

    status: Status
    records: list[dict[str, float]]
    trees: Rows
    processes: Rows


class Watcher:
    """Looks at a run, or at a journal file, again and again. Each look reads only what is new of
    metrics.jsonl and of the newest trees."""

    def __init__(self, run: Path):
        self.run = run
        shown = {metric for name, metric, _ in COLUMNS if name in CURVES}
        self._records = Reader(run, shown.__contains__, TAIL_BYTES)
        self._sums: dict[int, tuple[str, str, str]] = {}

    def look(self) -> Look:
        """Read what there is now."""
        now = status.gather(self.run, time.monotonic())
        records = self._records.read()
        try:
            trees = self._trees()
        except (OSError, sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            trees = []
            if not any("journal.sqlite" in text for text in now.damaged):
                now.damaged.append(f"the newest trees cannot be read ({error})")
        return Look(now, records, trees, _processes(self.run, now))

    def _trees(self) -> Rows:
        newest = "id IN (SELECT id FROM trees WHERE status{}='growing' ORDER BY id DESC LIMIT ?)"
        with contextlib.closing(frames.opened(self.run)) as journal:
            ended = journal.trees(newest.format("!"), ENDED)
            growing = journal.trees(newest.format(""), GROWING)
            self._sums = {row.id: self._sums.get(row.id) or _sums(journal, row) for row in ended}
            rows: Rows = []
            for row in (*reversed(ended), *reversed(growing)):
                trained = [version for _, version in journal.groups(row.id) if version is not None]
                state = row.status if row.split == "train" else row.split
                versions = str(row.version), str(max(trained, default="-"))
                sums = self._sums.get(row.id, ("-", "-", "-"))
                rows.append((str(row.id), state, *versions, *sums, row.task))
            return rows


def _sums(journal: Journal, row: TreeRow) -> tuple[str, str, str]:
    """The number of a tree's actions, their mean reward and the mean outcome."""
    nodes, means = journal.tree(row).nodes.values(), []
    for name in ("reward", "outcome"):
        values = [node.scores[name] for node in nodes if name in node.scores]
        means.append(f"{fmean(values):+.2f}" if values else "-")
    return str(sum(node.kind == "action" for node in nodes)), means[0], means[1]


def _processes(run: Path, now: Status) -> Rows:
    """The launcher's processes, then the workers that joined from elsewhere."""
    report = health.joined(health.read_all(run)) if now.state == "running" else None
    joined = report.workers if report is not None else []
    workers = {worker.pid: worker for worker in joined if worker.state == "here"}

    def calls(worker: health.WorkerHealth | None) -> str:
        limit = f"/{worker.capacity}" if worker and worker.capacity < 2**20 else ""
        return f"{worker.in_flight}{limit}" if worker else "-"

    rows: Rows = [(*status.cells(p), calls(workers.pop(p.pid, None))) for p in now.processes]
    for worker in workers.values():
        heard = span(report.at - worker.heard if report is not None else None)
        place = (worker.name, str(worker.pid), f"on {worker.host}", "-", "-", "-")
        rows.append((*place, heard, calls(worker)))
    return rows


# ----------------------------------------------------------------------------------------------
# text


def words(look: Look, width: int) -> list[str]:
    """Everything but the two tables, in lines of at most ``width`` columns."""
    lines = [*status.head(look.status, width), *curves(look.records, width)]
    said = [f"waits for {text}" for text in look.status.waits]
    if (failure := look.status.failure) is not None:
        when = ago(time.time() - failure.time, failure.process)
        log = status.shown(Path(failure.log))
        said.append(f"failed {when}: {failure.cause}; {failure.then} (log: {log})")
    said += [f"a call failed {look.status.fault}"] if look.status.fault else []
    said += [f"to do: {look.status.do}"] if look.status.do else []
    return lines + [line for text in said for line in status.told(text, width)]


def curves(records: Sequence[dict[str, float]], width: int) -> list[str]:
    """Each metric's first value, its course and its newest value; two metrics per line where there
    is room."""
    if not records:
        return ["curves: no update is recorded yet"]
    across = 2 if width >= 76 else 1
    each = (width - 2 * (across - 1)) // across
    cells = []
    for name, metric, form in COLUMNS:
        values = [record[metric] for record in records if metric in record]
        if name in CURVES and values:
            first, last = form.format(values[0]), form.format(values[-1])
            cells.append(f"{name:<8}{first:>6} {spark(values, each - 22):<{each - 22}} {last:>6}")
    return ["  ".join(cells[start : start + across]) for start in range(0, len(cells), across)]


def spark(values: Sequence[float], width: int) -> str:
    """Draw values from the lowest bar for the least to the highest for the largest; a bar is the
    mean of its share of the values."""
    count = max(1, min(width, len(values)))
    ends = pairwise(len(values) * place // count for place in range(count + 1))
    means = [fmean(values[start:end]) for start, end in ends]
    low, high = min(means), max(means)
    heights = [(mean - low) / (high - low) if high > low else 0.5 for mean in means]
    return "".join("▁▂▃▄▅▆▇█"[round(height * 7)] for height in heights)


def page(look: Look, width: int) -> list[str]:
    """Everything, for a pipe."""
    lines = words(look, width)
    trees, processes = ("newest trees", TREES, look.trees), ("processes", PROCESSES, look.processes)
    for title, names, rows in (trees, processes):
        shown = [f"  {line}" for line in table([names, *rows])]
        lines += [title, *shown] if rows else [f"{title}: none"]
    return lines
