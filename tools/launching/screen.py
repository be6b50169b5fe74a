"""What the launcher shows of a run: a row per update, and before each heading how far it is."""

import contextlib
import io
import os
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from datetime import timedelta
from typing import IO, Literal, TextIO

import msgspec

from coppice.common import shards
from coppice.common.terminal import visible
from coppice.scheduler.ledger.records import UPDATE, Joined
from coppice.scheduler.telemetry.alerts import NOTICE, WARNING

COLUMNS = [
    ("update", "version", "{:.0f}"),
    ("reward", "score/reward", "{:+.2f}"),
    ("seconds", "time/run", "{:.0f}"),
    ("valid", "score/valid", "{:.2f}"),
    ("think", "score/think", "{:+.2f}"),
    ("query", "score/query", "{:+.2f}"),
    ("answer", "score/answer", "{:+.2f}"),
    ("process", "score/process", "{:.2f}"),
    ("outcome", "rollout/outcome", "{:+.2f}"),
    ("search", "score/searches", "{:.2f}"),
    ("learner", "busy/learner", "{:.0%}"),
    ("engine", "busy/engine", "{:.0%}"),
    ("stale", "learner/staleness_mean", "{:.2f}"),
    ("tok/s", "rate/decoded_tokens", "{:.0f}"),
    ("cache", "cache/hit_rate", "{:.0%}"),
    ("turns", "learner/turns", "{:.0f}"),
    ("judged", "score/judge_valid", "{:.2f}"),
    ("saved", "cache/tokens_saved", "{:.0f}"),
]
"""Heading, metric and format of the live table's columns, the most important first: a narrow
terminal shows those that fit, and metrics.jsonl has them all. A column is shown once a record has
its metric. judged: the valid share of the judge's scores; search: searches per trajectory; engine
and learner: busy shares of wall time per process; cache and saved: the share and the number of
prompt tokens that the prefix cache served (docs/placement.md)."""
BLOCK = 20
"""Lines of the table between two headings."""
_PACE = 20
"""The number of last updates whose pace tells the time left."""


def told(text: str, width: int, indent: str = "") -> list[str]:
    """Fold a text to ``width`` columns; no word is broken."""
    wrapper = textwrap.TextWrapper(width, initial_indent=indent, subsequent_indent=f"{indent}  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


WIDEST = 100
"""The columns of the table on a wider terminal or in a file; COLUMNS changes it."""

Level = Literal["detail", "fault", "summary"]
"""--quiet leaves out the details."""


class RunScreen:
    """Shows the lines of one command, from any thread. out: where they go. updates: how many the
    run makes; records: where records go as JSON instead of into the table, or None; quiet: show
    faults and the end only; schedulers: how many the run has. Their records are joined; of the
    others' words than the first one's only faults are shown, with the scheduler's name."""

    def __init__(
        self, updates: int, quiet: bool = False, records: TextIO | None = None,
        out: TextIO | None = None, schedulers: int = 1,
    ):  # fmt: skip
        self._joined = Joined(schedulers)
        self.quiet, self._records = quiet, records
        self._out = out or sys.stdout
        if isinstance(self._out, io.TextIOWrapper):
            # a terminal that lacks a letter of a question must not end the relay
            self._out.reconfigure(errors="replace")
        self._lock, self._seen = threading.Lock(), set[str]()
        self._heading, self._rows = "", 0
        self._updates, self._reached = updates, deque[tuple[float, int]](maxlen=_PACE + 1)

    def say(self, text: str, level: Level = "fault") -> None:
        if self.quiet and level == "detail":
            return
        width = shutil.get_terminal_size().columns if self._out.isatty() else sys.maxsize
        with self._lock:
            for line in visible(text).split("\n"):
                lines = told(line, width) if len(line) > width else [line]
                self._write(self._out, "\n".join(lines) + "\n")

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
            return visible(line) + "\n"
        values = {name: value for name, value in record.items() if value is not None}
        copied = ""
        with self._lock:
            for whole in self._joined.add(number, values) if UPDATE in values else [values]:
                row = self._row(whole) if UPDATE in whole else ""
                copied += row
                if self._records is not None:
                    text = line if self._joined.parts == 1 else msgspec.json.encode(whole).decode()
                    self._write(self._records, text + "\n")
                elif not self.quiet:
                    self._write(self._out, row)
        return copied

    def _row(self, record: dict[str, float]) -> str:
        """Return a record's row, whose cells have seven characters. Above it come the headings and
        the share of the run, after ``BLOCK`` rows and when a column or another width comes."""
        columns = shutil.get_terminal_size((WIDEST, 24)).columns
        width = columns if "COLUMNS" in os.environ else min(WIDEST, columns)
        self._seen |= record.keys()
        shown = [column for column in COLUMNS if column[1] in self._seen][: (width + 2) // 9]
        cells = [form.format(record[key]) if key in record else "-" for _, key, form in shown]
        heading = "  ".join(f"{name:>7}" for name, _, _ in shown)
        row = "  ".join(f"{cell:>7}" for cell in cells)
        version, now = int(record["version"]), time.monotonic()
        if self._reached and version <= self._reached[-1][1]:  # made again, after a crash
            self._reached.clear()
        self._reached.append((now, version))
        self._rows = 0 if heading != self._heading else (self._rows + 1) % BLOCK
        if self._rows:
            return f"{row}\n"
        self._heading = heading
        share = f"{version} of {self._updates} updates ({version / max(1, self._updates):.0%})"
        start, first = self._reached[0]
        if first < version < self._updates:
            left = (now - start) / (version - first) * (self._updates - version)
            share += f", {timedelta(seconds=round(left))} left"
        return f"{share}\n{heading}\n{row}\n"

    def _write(self, out: TextIO, text: str) -> None:
        """Write at once. A terminal that is gone (a closed window, ``| head``) stops no run."""
        try:
            out.write(text)
            out.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
