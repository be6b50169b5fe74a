"""What the launcher shows of a run. On a terminal a progress bar is written anew in its place, above
the rows that came since. Elsewhere, and with NO_COLOR, it comes as a plain line with each heading,
and nothing is ever overwritten."""

import contextlib
import io
import os
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Literal, TextIO

import msgspec

from coppice.common import shards
from coppice.scheduler.ledger.records import UPDATE, Joined
from coppice.scheduler.telemetry.terminal import NOTICE, WARNING

COLUMNS = [
    ("update", "version", "{:.0f}"),
    ("reward", "score/reward", "{:+.2f}"),
    ("think", "score/think", "{:+.2f}"),
    ("query", "score/query", "{:+.2f}"),
    ("answer", "score/answer", "{:+.2f}"),
    ("process", "score/process", "{:.2f}"),
    ("judged", "score/judge_valid", "{:.2f}"),
    ("valid", "score/valid", "{:.2f}"),
    ("search", "score/searches", "{:.2f}"),
    ("outcome", "rollout/outcome", "{:+.2f}"),
    ("turns", "learner/turns", "{:.0f}"),
    ("stale", "learner/staleness_mean", "{:.2f}"),
    ("engine", "busy/engine", "{:.0%}"),
    ("learner", "busy/learner", "{:.0%}"),
    ("tok/s", "rate/decoded_tokens", "{:.0f}"),
    ("cache", "cache/hit_rate", "{:.0%}"),
    ("saved", "cache/tokens_saved", "{:.0f}"),
    ("seconds", "time/run", "{:.0f}"),
]
"""Heading, metric and format of the live table's columns. A column is shown once a record has its
metric. judged: the valid share of the judge's scores; search: searches per trajectory; engine and
learner: busy shares of wall time per process; cache and saved: the share and the number of prompt
tokens that the prefix cache served (docs/placement.md)."""
_LEAST = (
    "saved", "judged", "turns", "think", "cache", "outcome", "search", "tok/s", "stale", "learner", "engine", "answer", "query",
    "process", "valid", "seconds", "reward",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order; metrics.jsonl has them all."""
BLOCK = 20
"""Lines of the table between two headings."""
_PACE = 20
"""The number of last updates whose pace tells the time left."""


class Table:
    """Formats records. A heading comes first, after ``BLOCK`` lines, when a column or another width
    comes, and after ``restart``."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._heading = ""
        self._lines = 0

    def restart(self) -> None:
        """Begin the next line with a heading."""
        self._lines = 0

    def lines(self, record: Mapping[str, float], width: int, block: int = BLOCK) -> tuple[str, str]:
        """Return the heading ("" if none is due) and the record's line, each at most ``width``
        wide: a cell has seven characters, with two between."""
        self._known |= record.keys()
        columns = [column for column in COLUMNS if column[1] in self._known]
        for least in _LEAST:
            if 9 * len(columns) - 2 <= width:
                break
            columns = [column for column in columns if column[0] != least]
        heading = "  ".join(f"{name:>7}" for name, _, _ in columns)
        due = self._lines % block == 0 or heading != self._heading
        self._lines = 1 if due else self._lines + 1
        self._heading = heading
        cells = [form.format(record[key]) if key in record else "-" for _, key, form in columns]
        return heading if due else "", "  ".join(f"{cell:>7}" for cell in cells)


class Progress:
    """How far the run is, of ``updates`` updates."""

    def __init__(self, updates: int, clock: Callable[[], float] = time.monotonic):
        self.updates, self._clock = updates, clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_PACE + 1)

    def reached(self, version: int) -> None:
        """An update was made. One that is made again, after a crash, begins a new pace."""
        if self._seen and version <= self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((self._clock(), version))

    @property
    def done(self) -> bool:
        """True once all updates are made."""
        return bool(self._seen) and self._seen[-1][1] >= self.updates

    def line(self, width: int) -> tuple[str, str, str]:
        """Return the bar's full part, its empty part and the words, together at most ``width``
        wide; a narrow terminal has no bar."""
        version = self._seen[-1][1] if self._seen else 0
        share = min(1.0, version / max(1, self.updates))
        words = f"  {version} of {self.updates} updates  {share:4.0%}  {self._left(version)}"
        words = words.rstrip()
        room = min(40, width - len(words))
        if room < 5:
            return "", "", words.strip()[:width]
        full = round(share * room)
        return "#" * full, "." * (room - full), words

    def _left(self, version: int) -> str:
        if self.done:
            return "done"
        if len(self._seen) < 2:
            return ""
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return f"{spoken((end - start) / (last - first) * (self.updates - version))} left"


def spoken(seconds: float) -> str:
    """Return a time in its two largest units: "2 h 05 min", "3 min 20 s", "9 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
            # a terminal that lacks a letter of a question must not end the relay
            self._out.reconfigure(errors="replace")
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._live = self._out.isatty() and not plain
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
        level: Level = "summary" if line.startswith(NOTICE) else "detail"
        if line.startswith(WARNING):
            level = "fault"
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
                    rows = self._copied.lines(whole, WIDEST)
                    copied += "".join(f"{row}\n" for row in rows if row)
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
        elif not heading and self._progress.done:
            # nothing is written anew here, and the last bar tells of fewer updates
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
            rows = [max(1, -(-len(part) // width)) for part in line.split("\n")]
            self._below += sum(rows) if fold else 1
        coloured = self._colour(line, _YELLOW) if level == "fault" else line
        self._write(self._out, coloured + "\n")

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
