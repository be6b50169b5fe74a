"""What the launcher shows of a run: the scheduler's lines, its records as a table under a progress
bar, and its own lines about processes.

On a terminal the bar is written anew in its place, above the rows that came since. Elsewhere, and
with NO_COLOR, it comes as a plain line with each heading and after the last update, and nothing is
ever overwritten.
"""

import contextlib
import io
import os
import shutil
import sys
import textwrap
import threading
from typing import IO, Literal, TextIO

import msgspec

from coppice.common import shards
from coppice.scheduler.ledger.records import UPDATE, Joined
from coppice.scheduler.telemetry.terminal import NOTICE, WARNING
from coppice.tools.launching.table import BLOCK, Progress, Table

WIDEST = 100
"""The columns of the table on a wider terminal or in a file; COLUMNS changes it."""
_BOLD, _GREEN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[33m", "\x1b[0m"

Level = Literal["detail", "fault", "summary"]
"""--quiet leaves out the details."""


class Screen:
    """Shows the lines of one command, from any thread. out: where they go. updates: how many the
    run makes; records: where records go as JSON instead of into the table, or None; quiet: show
    faults and the end only; schedulers: how many the run has. Their records are joined; of the
    others' words than the first one's only faults are shown, with the scheduler's name."""

    def __init__(
        self,
        updates: int,
        quiet: bool = False,
        records: TextIO | None = None,
        out: TextIO | None = None,
        schedulers: int = 1,
    ):
        self._joined = Joined(schedulers)
        self.quiet, self._records = quiet, records
        self._out = out or sys.stdout
        if isinstance(self._out, io.TextIOWrapper):
            self._out.reconfigure(
                errors="replace"
            )  # a terminal that lacks a letter of a question must not end the relay
        self._live = (
            self._out.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        self._table, self._copied, self._progress = Table(), Table(), Progress(updates)
        self._lock = threading.Lock()
        self._size = os.terminal_size((0, 0))
        self._below = 0
        """Lines between the bar and the cursor; 0 if no bar can be reached."""

    def say(self, text: str, level: Level = "fault") -> None:
        """Show lines of the launcher's own."""
        with self._lock:
            for line in text.split("\n"):
                self._print(line, level)

    def relay(self, source: IO[bytes], copy: IO[bytes], number: int = 0) -> None:
        """Show the lines of a scheduler, and write them to a file. Neither a closed terminal (``|
        head``) nor a full disk stops the relay."""
        with copy:
            for line in source:
                shown = self._take(line.decode(errors="replace").rstrip("\n"), number)
                with contextlib.suppress(OSError):
                    copy.write(shown.encode())

    def _take(self, line: str, number: int = 0) -> str:
        """Show a line of a scheduler, and return what the copy has of it."""
        level: Level = (
            "fault"
            if line.startswith(WARNING)
            else "summary"
            if line.startswith(NOTICE)
            else "detail"
        )
        try:
            record = msgspec.json.decode(line, type=dict[str, float | None])
        except msgspec.DecodeError:  # words, or a record that a death cut off
            line = line.removeprefix(WARNING).removeprefix(NOTICE)
            line = f"{shards.called('scheduler', number)}: {line}" if number else line
            if not number or level == "fault":
                self.say(line, level)
            return line + "\n"
        values = {name: value for name, value in record.items() if value is not None}
        copied = ""
        with self._lock:
            for whole in self._joined.add(number, values) if UPDATE in values else [values]:
                if self._records is not None:
                    text = line if self._joined.parts == 1 else msgspec.json.encode(whole).decode()
                    self._write(self._records, text + "\n")
                elif UPDATE in whole and not self.quiet:
                    self._row(whole)
                if UPDATE in whole:
                    copied += "".join(
                        f"{text}\n" for text in self._copied.lines(whole, WIDEST) if text
                    )
        return copied

    def _row(self, record: dict[str, float]) -> None:
        """Show a record in the table, below the bar that belongs to its heading."""
        size = shutil.get_terminal_size((WIDEST, 24))
        if self._below + 1 >= size.lines or size != self._size:
            self._below = 0
        if self._live and not self._below:
            self._table.restart()
        self._size = size
        self._progress.reached(int(record["version"]))
        width = size.columns if "COLUMNS" in os.environ else min(WIDEST, size.columns)
        heading, row = self._table.lines(record, width, max(1, min(BLOCK, size.lines - 4)))
        if heading:
            self._below = 0
            self._print(self._bar(width), "detail", fold=False)
            self._print(self._colour(heading, _BOLD), "detail", fold=False)
            self._below = 2 if self._live else 0
        self._print(row, "detail", fold=False)
        if self._live and not heading:
            up = self._below
            self._write(self._out, f"\x1b[{up}A\r\x1b[K{self._bar(width)}\x1b[{up}B\r")
        elif (
            not heading and self._progress.done
        ):  # nothing is written anew here, and the last bar tells of fewer updates
            self._print(self._bar(width), "detail", fold=False)

    def _bar(self, width: int) -> str:
        full, empty, words = self._progress.line(width - 1)
        return self._colour(full, _GREEN) + empty + words

    def _print(self, line: str, level: Level, fold: bool = True) -> None:
        """Print one line, folded to the terminal's width."""
        if self.quiet and level == "detail":
            return
        width = shutil.get_terminal_size().columns
        if fold and len(line) > width and self._out.isatty():
            line = textwrap.fill(
                line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
        if self._below:
            self._below += (
                sum(max(1, -(-len(part) // width)) for part in line.split("\n")) if fold else 1
            )
        self._write(self._out, (self._colour(line, _YELLOW) if level == "fault" else line) + "\n")

    def _colour(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._live and text.strip() else text

    def _write(self, out: TextIO, text: str) -> None:
        """Write at once. A terminal that is gone (a closed window, ``| head``) stops no run."""
        try:
            out.write(text)
            out.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
