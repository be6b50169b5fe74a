"""The command coppice watch: a live view of a run, with keys that pause and resume it, drain a
worker and stop it."""

import argparse
import asyncio
import contextlib
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import msgspec
import psutil
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, OptionList, Static

from coppice.common.options import command_parser, gave_up
from coppice.common.terminal import visible
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.ledger.records import Reader
from coppice.scheduler.telemetry import health
from coppice.tools.evaluating.examination import table
from coppice.tools.inspecting import frames
from coppice.tools.launching import control, screen, status
from coppice.tools.launching.status import Status, ago, span

EXAMPLES = """\
  coppice watch RUN                  the run folder, live, stopped or broken
  coppice watch RUN/journal.sqlite   a journal alone: its trees
  coppice watch RUN | cat            its status, where there is no terminal"""
EVERY_S, RESTING_S = 2.0, 5.0
"""Seconds between two looks at a run that is running, and at one that is not."""
BAD = ("ended", psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""States of a process of a running run that are shown in red."""


# What is shown, as plain text. Nothing raises for what is missing or damaged.

CURVES = "reward outcome process valid judged engine learner cache tok/s stale".split()
"""The columns of the terminal's table that are drawn, if the run has them. engine, learner: busy
shares; cache: prompt tokens that the prefix cache served."""
ENDED, GROWING = 8, 4
"""The newest trees that are listed."""
TAIL_BYTES = 2**24
"""How much of a long metrics.jsonl is read at first: the newest 4,000 updates or so."""
TREES = ("tree", "status", "from", "trained", "reward", "outcome", "question")
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
        shown = {metric for name, metric, _ in screen.COLUMNS if name in CURVES}
        self._records = Reader(run, shown.__contains__, TAIL_BYTES)
        self._sums: dict[int, tuple[str, str, str]] = {}

    def look(self) -> Look:
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
        with frames.opened(self.run) as journal:
            ended = journal.trees(newest.format("!"), ENDED)
            growing = journal.trees(newest.format(""), GROWING)
            self._sums = {row.id: self._sums.get(row.id) or _sums(journal, row) for row in ended}
            rows: Rows = []
            for row in (*reversed(ended), *reversed(growing)):
                trained = [version for _, version in journal.groups(row.id) if version is not None]
                state = row.status if row.split == "train" else row.split
                versions = str(row.version), str(max(trained, default="-"))
                sums = self._sums.get(row.id) or _sums(journal, row)
                rows.append((str(row.id), state, *versions, *sums))
            return rows


def _sums(journal: Journal, row: TreeRow) -> tuple[str, str, str]:
    """The mean reward and outcome of a tree, and its question."""
    nodes, means = list(journal.tree(row).nodes.values()), []
    for name in ("reward", "outcome"):
        values = [node.scores[name] for node in nodes if name in node.scores]
        means.append(f"{fmean(values):+.2f}" if values else "-")
    words = frames.question(nodes[0].text) if nodes else ""
    return means[0], means[1], words or row.task


def _processes(run: Path, now: Status) -> Rows:
    """The launcher's processes, then the workers that joined from elsewhere."""
    report = health.joined(health.read_all(run)) if now.state == "running" else None
    joined = report.workers if report is not None else []
    # guests have no number
    workers = {worker.pid or worker.name: worker for worker in joined if worker.state == "here"}

    def calls(worker: health.WorkerHealth | None) -> str:
        limit = f"/{worker.capacity}" if worker and worker.capacity < 2**20 else ""
        return f"{worker.in_flight}{limit}" if worker else "-"

    rows: Rows = [(*status.cells(p), calls(workers.pop(p.pid, None))) for p in now.processes]
    for worker in workers.values():
        heard = span(report.at - worker.heard if report is not None else None)
        place = (worker.name, str(worker.pid or "-"), f"on {worker.host}", "-", "-", "-")
        rows.append((*place, heard, calls(worker)))
    return rows


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
    for name, metric, form in screen.COLUMNS:
        values = [record[metric] for record in records if metric in record]
        if name in CURVES and values:
            first, last = (f"{form.format(values[place]):>6}" for place in (0, -1))
            room = each - 10 - len(first) - len(last)
            cells.append(f"{name:<8}{first} {spark(values, room):<{room}} {last}")
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


class Question(ModalScreen[bool]):
    """Asks once more. Only y means yes."""

    CSS = """
    Question { align: center middle; }
    Question Static { width: 70; max-width: 90%; height: auto; padding: 1 2; }
    Question Static { border: round $warning; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "Yes"),
        ("n,escape,q,enter", "dismiss(False)", "No"),
    ]

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        yield Static(f"{self.text}\n\ny: yes    n: no", markup=False)


class ProcessTable(OptionList):
    """The processes. The cursor stays at its row when others come and go."""

    def __init__(self):
        super().__init__(id="processes", compact=True, markup=False)
        self.cells: Rows = []

    def show(self, rows: Rows, bad: tuple[str, ...] = ()) -> None:
        """Show ``rows``. bad: cells whose rows are red."""
        if rows == self.cells:
            return
        place, key = self.highlighted or 0, self.chosen()
        self.border_title, *lines = table([PROCESSES, *rows])
        self.cells, names = rows, [row[0] for row in rows]
        styles = ["bold red" if set(bad) & set(row) else "" for row in rows]
        self.set_options(Text(*line) for line in zip(lines, styles, strict=True))
        self.styles.height = len(rows) + 1
        if names:
            self.highlighted = names.index(key) if key in names else min(place, len(names) - 1)

    def chosen(self) -> str:
        """The first cell of the row under the cursor, or "" if the table is empty."""
        return "" if self.highlighted is None or not self.cells else self.cells[self.highlighted][0]


class WatchApp(App[None]):
    """The view of one run. It only reads, and gives the orders of tools/launching/control.py when
    asked to."""

    TITLE, AUTO_FOCUS, ENABLE_COMMAND_PALETTE = "coppice watch", "", False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (150, "-wide")]
    CSS = """
    #page { scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    #words, #tables { height: auto; }
    .-wide #page { layout: horizontal; }
    .-wide #words { width: 79; margin-right: 1; }
    .-wide #tables { width: 1fr; }
    #trees, #processes { padding: 0 0 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #processes, #processes:focus { border: none; border-top: heavy $accent; scrollbar-size: 1 1; }
    #processes { max-height: 14; }
    .-wide #processes { max-height: 48vh; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("r", "resume", "Resume"),
        Binding("d", "drain", "Drain worker"),
        Binding("s", "stop", "Stop run"),
        Binding("q", "quit", "Quit (the run goes on)"),
    ]

    def __init__(self, run: Path):
        super().__init__()
        self.run_, self.reader = run, Watcher(run)
        self.look: Look | None = None
        self.usable: dict[str, bool] = dict.fromkeys(("pause", "resume", "drain", "stop"), False)
        self.ordered = asyncio.Event()

    def compose(self) -> ComposeResult:
        """Words and tables, below each other on a narrow terminal."""
        with VerticalScroll(id="page"):
            with Vertical(id="words"):
                yield Static(id="text", markup=False)
            with Vertical(id="tables"):
                yield Static(id="trees", markup=False)
                yield ProcessTable()
        yield Footer()

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#processes"), scroll_visible=False)
        self.follow()

    @work
    async def follow(self) -> None:
        """Look at the run again and again, in a thread, because its disk may be slow."""
        while True:
            self.look = await asyncio.to_thread(self.reader.look)
            self.draw()
            every = EVERY_S if self.look.status.state == "running" else RESTING_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ordered.wait(), every)
            self.ordered.clear()

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Show the newest look; what has not changed is not drawn again."""
        if self.look is None or not self.query("#text"):  # it begins, or it closes
            return
        before = self.usable
        width = self.query_one("#words").content_size.width or 78
        text = visible("\n".join(words(self.look, width)))
        label = self.query_one("#text", Static)
        if text != label.content:
            label.update(text, layout=text.count("\n") != str(label.content).count("\n"))
        running = self.look.status.state == "running"
        paused = self.look.status.paused.startswith("paus")
        trees = visible("\n".join(table([TREES, *self.look.trees])))
        self.query_one("#trees", Static).update(trees)
        self.query_one(ProcessTable).show(self.look.processes, BAD if running else ())
        self.usable = {"pause": running and not paused, "resume": running and paused}
        self.usable |= {"drain": running, "stop": running}
        if self.usable != before:
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys that cannot be used now."""
        return self.usable.get(action, True)

    def action_pause(self) -> None:
        end = "No new tree begins until you resume it, also when this view is closed."
        self.order(f"Pause the run? {end}", control.pause)

    def action_resume(self) -> None:
        self.order("", control.resume)

    def action_drain(self) -> None:
        name = self.query_one(ProcessTable).chosen()
        try:
            question = f"Drain {name}? {control.draining(self.run_, name)}"
            self.order(question, partial(control.drain, name=name))
        except ValueError as error:
            self.notify(str(error), severity="error")

    def action_stop(self) -> None:
        end = "The learner writes a checkpoint and every process ends."
        self.order(f"Stop the run? {end} coppice launch --resume goes on.", control.stop)

    @work
    async def order(self, question: str, order: Callable[[Path], str]) -> None:
        """Give an order, after a question if there is one, and show what it said."""
        if question and not await self.push_screen_wait(Question(question)):
            return
        try:
            self.notify(order(self.run_))
        except (OSError, ValueError, psutil.Error) as error:
            self.notify(str(error), severity="error", timeout=15)
        self.ordered.set()


def parser() -> argparse.ArgumentParser:
    what = "A live view of a run; keys pause, resume, drain a worker, stop."
    parser = command_parser("coppice watch", what, EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a journal file")
    return parser


def main(arguments: list[str] | None = None) -> int:
    run: Path = parser().parse_args(arguments).run.resolve()
    if not (run.is_file() or (run / "config.json").exists() or (run / "journal.sqlite").exists()):
        expected = "expected the folder of a run (runs/NAME-TIME) or a journal file"
        return gave_up("coppice watch", f"{run}: {expected}")
    if sys.stdin.isatty() and sys.stdout.isatty():
        WatchApp(run).run()
    else:
        page = "\n".join(status.page(status.gather(run, time.monotonic())))
        screen.RunScreen(0).say(page, "summary")  # the reader (head, less) may close the pipe
    return 0
