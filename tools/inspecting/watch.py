"""The command coppice watch: a live view of a run, with keys that open a tree, pause and resume the
run, drain a worker and stop the run."""

import argparse
import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, OptionList, Static

from coppice.common.options import command_parser
from coppice.tools.inspecting import drawing, frames, watched
from coppice.tools.inspecting.watched import Look, Watcher
from coppice.tools.launching import control, screen

EXAMPLES = """\
  coppice watch RUN                  the run folder, live, stopped or broken
  coppice watch RUN/journal.sqlite   a journal alone: its trees
  coppice watch RUN | cat            one page, where there is no terminal"""
EVERY_S, RESTING_S = 2.0, 5.0
"""Seconds between two looks at a run that is running, and at one that is not."""
BAD = ("ended", psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""States of a process of a running run that are shown in red."""


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
        """The question."""
        yield Static(f"{self.text}\n\ny: yes    n: no", markup=False)


class TreeScreen(Screen[None]):
    """One tree, as coppice trees prints it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q", "dismiss", "Back"),
        ("f", "full", "Whole texts"),
    ]

    def __init__(self, run: Path, number: int):
        super().__init__()
        self.run, self.number, self.full = run, number, False

    def compose(self) -> ComposeResult:
        """A page that scrolls."""
        with VerticalScroll():
            yield Static(id="tree", markup=False)
        yield Footer()

    def on_resize(self) -> None:
        """Draw the tree, first and whenever the width changes."""
        try:
            with contextlib.closing(frames.opened(self.run)) as journal:
                (row,) = journal.trees("id=?", self.number)
                detail = drawing.Detail(max(40, self.size.width - 3), self.full)
                text = drawing.as_text(journal, row, detail)
        except (OSError, sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            text = f"tree {self.number} cannot be read: {error}"
        self.query_one("#tree", Static).update(text.replace("(--full)", "(key f)"))

    def action_full(self) -> None:
        """Show whole texts and the judges' explanations, or fold them again."""
        self.full = not self.full
        self.on_resize()


class RowTable(OptionList):
    """A table whose title names the columns. Its cursor stays at its row when rows come and go; at
    the top it stays with the newest."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "app.focus_next", "Next table")]

    def __init__(self, name: str, columns: tuple[str, ...]):
        super().__init__(id=name, compact=True, markup=False)
        self.columns = columns
        self.cells: watched.Rows = []

    def show(self, rows: watched.Rows, bad: tuple[str, ...] = ()) -> None:
        """Show ``rows``, whose first cells tell them apart. bad: cells whose rows are red."""
        if rows == self.cells:
            return
        place, key = self.highlighted or 0, self.chosen()
        self.border_title, *lines = watched.table([self.columns, *rows])
        self.cells, names = rows, [row[0] for row in rows]
        styles = ["bold red" if set(bad) & set(row) else "" for row in rows]
        self.set_options(Text(*line) for line in zip(lines, styles, strict=True))
        self.styles.height = len(rows) + 1
        if names:
            kept = place and key in names
            self.highlighted = names.index(key) if kept else min(place, len(names) - 1)

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
    RowTable { border: none; border-top: solid $primary; padding: 0 0 0 1; max-height: 14; }
    RowTable { scrollbar-size: 1 1; text-wrap: nowrap; text-overflow: ellipsis; }
    RowTable:focus { border: none; border-top: heavy $accent; }
    #trees { max-height: 9; }
    .-wide RowTable, .-wide #trees { max-height: 48vh; }
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
                yield RowTable("trees", watched.TREES)
                yield RowTable("processes", watched.PROCESSES)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.set_focus(self.query_one("#trees"), scroll_visible=False)
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
        """Fold the words anew."""
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Show the newest look; what has not changed is not drawn again."""
        if self.look is None or not self.query("#text"):  # it begins, or it closes
            return
        before = self.usable
        width = self.query_one("#words").content_size.width or 78
        text = "\n".join(watched.words(self.look, width))
        label = self.query_one("#text", Static)
        if text != label.content:
            label.update(text, layout=text.count("\n") != str(label.content).count("\n"))
        running = self.look.status.state == "running"
        paused = self.look.status.paused.startswith("paus")
        self.query_one("#trees", RowTable).show(self.look.trees)
        self.query_one("#processes", RowTable).show(self.look.processes, BAD if running else ())
        self.usable = {"pause": running and not paused, "resume": running and paused}
        self.usable |= {"drain": running, "stop": running}
        if self.usable != before:
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys that cannot be used now."""
        return self.usable.get(action, True)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the tree under the cursor."""
        table = event.option_list
        if isinstance(table, RowTable) and table.id == "trees":
            self.push_screen(TreeScreen(self.run_, int(table.chosen())))

    def action_pause(self) -> None:
        """Ask, then pause."""
        end = "No new tree begins until you resume it, also when this view is closed."
        self.order(f"Pause the run? {end}", control.pause)

    def action_resume(self) -> None:
        """Resume, which needs no second question."""
        self.order("", control.resume)

    def action_drain(self) -> None:
        """Ask, then drain the worker under the cursor."""
        table = self.query_one("#processes", RowTable)
        name = table.chosen()
        if self.focused is not table or not name:
            self.notify("choose a worker in the table of processes first (Tab)", severity="warning")
            return
        try:
            question = f"Drain {name}? {control.draining(self.run_, name)}"
            self.order(question, partial(control.drain, name=name))
        except ValueError as error:
            self.notify(str(error), severity="error")

    def action_stop(self) -> None:
        """Ask, then stop the run."""
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
    """Return the parser of coppice watch."""
    parser = command_parser(
        "coppice watch",
        "A live view of a run; keys open a tree, pause, resume, drain a worker, stop.",
        EXAMPLES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a journal file")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    run: Path = parser().parse_args(arguments).run.resolve()
    if not (run.is_file() or (run / "config.json").exists() or (run / "journal.sqlite").exists()):
        expected = "expected the folder of a run (runs/NAME-TIME) or a journal file"
        print(f"coppice watch: {run}: {expected}", file=sys.stderr)
        return 2
    if sys.stdin.isatty() and sys.stdout.isatty():
        WatchApp(run).run()
    else:
        page = "\n".join(watched.page(Watcher(run).look(), 80))
        screen.RunScreen(0).say(page, "summary")  # the reader (head, less) may close the pipe
    return 0
