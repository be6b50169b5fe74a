"""The records of a run's updates, of all its schedulers: each has its own metrics.jsonl, and
``joined`` makes one record of theirs."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from coppice.common import shards
from coppice.common.jsonl import MALFORMED

Record = dict[str, float]
UPDATE = "learner/groups"
"""The metric that every update's record has, and no evaluation's."""

SUM, LARGEST = "sum", "largest"
JOINED = {
    "busy/engine": "busy/engines",
    "cache/prefilled_over_ideal": "cache/ideal_tokens",
    "rollout/outcome": "rollout/outcomes",
    "score/judge_valid": "rollout/judged_scores",
    "time/spread": LARGEST,
    "cache/hit_rate": "cache/prompt_tokens",
    "cache/predicted_hit_rate": "cache/prompt_tokens",
    "cache/prediction_error": "cache/prompt_tokens",
    "cache/ideal_tokens": SUM,
    "cache/prompt_tokens": SUM,
    "cache/tokens_saved": SUM,
    "busy/engines": SUM,
    "count/*": SUM,
    "rate/decoded_tokens": SUM,
    "rollout/judged_scores": SUM,
    "rollout/outcomes": SUM,
}
"""How the records that several schedulers have of one update become the run's: a sum, the largest,
or the mean weighted by another metric. A metric without a rule has the first scheduler's value: the
learner tells all schedulers the same, and the clock is the first one's."""


def joined(records: Sequence[Record]) -> Record:
    """Return the run's record of an update. records: those of its schedulers, in order."""
    whole: Record = {}
    for name in dict.fromkeys(name for record in records for name in record):
        having = [record for record in records if name in record]
        values = [record[name] for record in having]
        rule = JOINED.get("count/*" if name.startswith("count/") else name)
        if len(values) == 1 or not rule:
            whole[name] = values[0]
        elif rule in (SUM, LARGEST):
            whole[name] = sum(values) if rule == SUM else max(values)
        else:
            weights = [record.get(rule, 1.0) for record in having]
            whole[name] = fmean(values, weights if sum(weights) else None)
    return whole


def parsed(text: bytes) -> Iterator[tuple[bytes, dict[str, float | None]]]:
    """Yield each line of a metrics.jsonl with its record, but none that a crash cut off or that is
    damaged."""
    for line in text.splitlines():
        with contextlib.suppress(*MALFORMED):
            record = msgspec.json.decode(line, type=dict[str, float | None])
            if record.get("version") is not None:
                yield line, record


class Joined:
    """Makes one record of those that ``parts`` schedulers have of an update."""

    def __init__(self, parts: int):
        self.parts = parts
        self._open: dict[int, dict[int, Record]] = {}

    def add(self, part: int, record: Record) -> list[Record]:
        """Take a scheduler's record. Return the records of updates that it completes."""
        version = int(record["version"])
        self._open.setdefault(version, {})[part] = record
        if len(self._open[version]) < self.parts:
            return []
        ready = [self._open.pop(v) for v in sorted(self._open) if v <= version]
        return [joined([by_part[p] for p in sorted(by_part)]) for by_part in ready if 0 in by_part]


class Reader:
    """Reads what is new. keep: whether a metric is kept. tail: bytes of a file read at first."""

    def __init__(
        self, run: Path, keep: Callable[[str], bool] = lambda _: True, tail: int | None = None
    ):
        self.run, self._keep, self._tail = run, keep, tail
        self._files: dict[Path, tuple[int, int]] = {}  # of each the inode and how far it was read
        self._joined, self._records = Joined(1), dict[int, Record]()

    def read(self) -> list[Record]:
        """Return the updates' records in order, of several for one update the last."""
        for record in self.new():
            self._records[int(record["version"])] = record
        return [record for _, record in sorted(self._records.items())]

    def new(self) -> list[Record]:
        """Return the records that are new and whole, all if a file was written anew."""
        paths = [home / "metrics.jsonl" for home in shards.homes(self.run)]
        if self._joined.parts != len(paths) or any(map(self._rewritten, paths)):
            self._joined, self._records, self._files = Joined(len(paths)), {}, {}
        parts = [(part, record) for part, path in enumerate(paths) for record in self._new(path)]
        parts.sort(key=lambda one: one[1]["version"])
        new = []
        for part, record in parts:
            for whole in self._joined.add(part, record):
                kept = {name: value for name, value in whole.items() if self._keep(name)}
                new.append(kept | {"version": whole["version"]})
        return new

    def _rewritten(self, path: Path) -> bool:
        """Whether a file that was read is another one by now, as when the run is resumed."""
        if path not in self._files or not path.exists():
            return False
        (inode, at), now = self._files[path], path.stat()
        return now.st_ino != inode or now.st_size < at

    def _new(self, path: Path) -> list[Record]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            now = os.fstat(file.fileno())
            first = max(0, now.st_size - self._tail) if self._tail else 0
            _, at = self._files.get(path, (0, first))
            file.seek(at)
            lines, end, _ = file.read().rpartition(b"\n")
            self._files[path] = now.st_ino, at + len(lines) + len(end)
            updates = (record for _, record in parsed(lines) if UPDATE in record)
            return [{k: v for k, v in record.items() if v is not None} for record in updates]
        return []
