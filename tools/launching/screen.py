"""What the launcher shows of a run: rows, above a progress bar that is written anew in a terminal's
last line. Elsewhere, and with NO_COLOR, the bar is a plain line before each heading."""

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
from coppice.scheduler.telemetry.alerts import NOTICE, WARNING

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
    "saved judged turns think cache outcome search tok/s stale learner engine answer query process"
    " valid seconds reward"
).split()
"""Columns that a narrow terminal leaves out, in this order; metrics.jsonl has them all."""
BLOCK = 20
"""Lines of the table between two headings."""
_PACE = 20
"""The number of last updates whose pace tells the time left."""


class UpdateTable:
    """Formats records as rows. A heading comes first, after ``BLOCK`` rows, and when a column or
    another width comes."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._heading = ""
        self._rows = 0

    def lines(self, record: Mapping[str, float], width: int, block: int = BLOCK) -> tuple[str, str]:
        """Return the heading ("" if none is due) and the record's row, each at most ``width`` wide:
        a cell has seven characters, with two between."""
        self._seen |= record.keys()
        columns = [column for column in COLUMNS if column[1] in self._seen]
        for least in _LEAST:
            if 9 * len(columns) - 2 <= width:
                break
            columns = [column for column in columns if column[0] != least]
        heading = "  ".join(f"{name:>7}" for name, _, _ in columns)
        due = self._rows % block == 0 or heading != self._heading
        self._rows = 1 if due else self._rows + 1
        self._heading = heading
        cells = [form.format(record[key]) if key in record else "-" for _, key, form in columns]
        return heading if due else "", "  ".join(f"{cell:>7}" for cell in cells)


class ProgressBar:
    """How far the run is, of ``updates`` updates."""

    def __init__(self, updates: int, clock: Callable[[], float] = time.monotonic):
        self.updates, self._clock = updates, clock
        self._reached: deque[tuple[float, int]] = deque(maxlen=_PACE + 1)

    def reached(self, version: int) -> None:
        """An update was made. One that is made again, after a crash, begins a new pace."""
        if self._reached and version <= self._reached[-1][1]:
            self._reached.clear()
        self._reached.append((self._clock(), version))

    @property
    def done(self) -> bool:
        """True once all updates are made."""
        return bool(self._reached) and self._reached[-1][1] >= self.updates

    def line(self, width: int) -> tuple[str, str, str]:
        """Return the bar's full part, its empty part and the words, together at most ``width``
        wide; a narrow terminal has no bar."""
        version, left = self._reached[-1][1] if self._reached else 0, ""
        if self.done:
            left = "done"
        elif len(self._reached) > 1:
            (start, first), (end, last) = self._reached[0], self._reached[-1]
            left = f"{spoken((end - start) / (last - first) * (self.updates - version))} left"
        share = min(1.0, version / max(1, self.updates))
        words = f"  {version} of {self.updates} updates  {share:4.0%}  {left}".rstrip()
        room = min(40, width - len(words))
        if room < 5:
            return "", "", words.strip()[:width]
        full = round(share * room)
        return "#" * full, "." * (room - full), words


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


class RunScreen:
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
        self._table, self._copied = UpdateTable(), UpdateTable()
        self._progress = ProgressBar(updates)
        self._lock = threading.Lock()
        self._last = ""
        """The bar that stands in the last line, or "" if there is none."""

    def say(self, text: str, level: Level = "fault") -> None:
        """Show lines of the launcher's own."""
        if self.quiet and level == "detail":
            return
        width = shutil.get_terminal_size().columns if self._out.isatty() else sys.maxsize
        folded = [
            textwrap.fill(
                line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            if len(line) > width
            else line
            for line in text.split("\n")
        ]
        with self._lock:
            self._print([self._colour(line, _YELLOW * (level == "fault")) for line in folded])

    def relay(self, source: IO[bytes], copy: IO[bytes], number: int = 0) -> None:
        """Show the lines of a scheduler, and write them to a file. Neither a closed terminal (``|
        head``) nor a full disk stops the relay."""
        with copy:
            for line in source:
                shown = self.take(line.decode(errors="replace").rstrip("\n"), number)
                with contextlib.suppress(OSError):
                    copy.write(shown.encode())

    def take(self, line: str, number: int = 0) -> str:
        """Show a line of a scheduler, and return what the copy has of it."""
        try:
            record = msgspec.json.decode(line, type=dict[str, float | None])
        except msgspec.DecodeError:  # words, or a record that a death cut off
            level: Level = "summary" if line.startswith(NOTICE) else "detail"
            level = "fault" if line.startswith(WARNING) else level
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
        """Show a record in the table. Elsewhere than on a terminal, each heading has a bar."""
        columns, lines = shutil.get_terminal_size((WIDEST, 24))
        width = columns if "COLUMNS" in os.environ else min(WIDEST, columns)
        heading, row = self._table.lines(record, width, max(1, min(BLOCK, lines - 4)))
        self._progress.reached(int(record["version"]))
        full, empty, words = self._progress.line(width - 1)
        bar, done = self._colour(full, _GREEN) + empty + words, self._progress.done
        rows = [self._colour(heading, _BOLD), row] if heading else [row]
        if self._live:
            self._print([*rows, bar] if done else rows, "" if done else bar)
        else:
            self._print([bar, *rows] if heading else [*rows, bar] if done else rows)

    def _print(self, lines: list[str], bar: str | None = None) -> None:
        """Print lines above the bar, which is ``bar`` from now on, if it is named."""
        start = "\x1b[1A\r\x1b[K" if self._last else ""
        self._last = self._last if bar is None else bar
        whole = [*lines, self._last] if self._last else lines
        self._write(self._out, start + "\n".join(whole) + "\n")

    def _colour(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._live and colour and text.strip() else text

    def _write(self, out: TextIO, text: str) -> None:
        """Write at once. A terminal that is gone (a closed window, ``| head``) stops no run."""
        try:
            out.write(text)
            out.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
