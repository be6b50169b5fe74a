"""The live table of a run, and its progress in one line. This module is pure but for the injected
clock."""

import time
from collections import deque
from collections.abc import Callable, Mapping

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
        words = (
            f"  {version} of {self.updates} updates  {share:4.0%}  {self._left(version)}".rstrip()
        )
        room = min(40, width - len(words))
        full = round(share * room)
        return (
            ("#" * full, "." * (room - full), words)
            if room >= 5
            else ("", "", words.strip()[:width])
        )

    def _left(self, version: int) -> str:
        (start, first), (end, last) = (
            (self._seen[0], self._seen[-1]) if self._seen else ((0, 0), (0, 0))
        )
        if self.done:
            return "done"
        return (
            f"{spoken((end - start) / (last - first) * (self.updates - version))} left"
            if last > first
            else ""
        )


def spoken(seconds: float) -> str:
    """Return a time in its two largest units: "2 h 05 min", "3 min 20 s", "9 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
