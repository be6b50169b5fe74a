"""The records of a run's updates, of all its schedulers: each has its own metrics.jsonl, and
``joined`` makes one record of theirs."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from coppice.common import shards

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
    **dict.fromkeys(
        ("cache/hit_rate", "cache/predicted_hit_rate", "cache/prediction_error"),
        "cache/prompt_tokens",
    ),
    **dict.fromkeys(("cache/ideal_tokens", "cache/prompt_tokens", "cache/tokens_saved"), SUM),
    **dict.fromkeys(("busy/engines", "count/*", "rate/decoded_tokens"), SUM),
    **dict.fromkeys(("rollout/judged_scores", "rollout/outcomes"), SUM),
}
"""How the records that several schedulers have of one update become the run's: a sum, the largest,
or the mean weighted by another metric. A metric without a rule has the first scheduler's value: the
learner tells all schedulers the same, and the clock is the first one's."""


def joined(records: Sequence[Record]) -> Record:
    """Return the run's record of an update. records: those of its schedulers, in order."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: _joined(name, [record for record in records if name in record]) for name in names}


def _joined(name: str, records: Sequence[Record]) -> float:
    values = [record[name] for record in records]
    rule = JOINED.get("count/*" if name.startswith("count/") else name)
    if len(values) == 1 or not rule:
        return values[0]
    if rule in (SUM, LARGEST):
        return sum(values) if rule == SUM else max(values)
    weights = [record.get(rule, 1.0) for record in records]
    whole = sum(weights)
    return (
        sum(v * w for v, w in zip(values, weights, strict=True)) / whole
        if whole
        else sum(values) / len(values)
    )


def parsed(text: bytes) -> Iterator[tuple[bytes, dict[str, float | None]]]:
    """Yield each line of a metrics.jsonl with its record, but none that a crash cut off."""
    for line in text.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield line, msgspec.json.decode(line, type=dict[str, float | None])


class Joined:
    """Makes one record of those that ``parts`` schedulers have of an update, in whatever order they
    come."""

    def __init__(self, parts: int):
        self.parts = parts
        self._open: dict[int, dict[int, Record]] = {}

    def add(self, part: int, record: Record) -> list[Record]:
        """Take the record of a scheduler. Return what it completes: the record of its update, after
        those of which a crash lost a part."""
        version = int(record["version"])
        self._open.setdefault(version, {})[part] = record
        if len(self._open[version]) < self.parts:
            return []
        whole = [self._open.pop(known) for known in sorted(self._open) if known <= version]
        return [joined([known[part] for part in sorted(known)]) for known in whole if 0 in known]


class Reader:
    """Reads the records again and again, each time what is new. keep: whether a metric is kept.
    tail: how many bytes of a file are read at first."""

    def __init__(
        self, run: Path, keep: Callable[[str], bool] = lambda _: True, tail: int | None = None
    ):
        self.run, self._keep, self._tail = run, keep, tail
        self._files: dict[Path, tuple[int, int]] = {}
        self._joined, self._records = Joined(1), dict[int, Record]()

    def read(self) -> list[Record]:
        """Return the updates' records in order; of one that is there twice, the last. What is cut
        off or no number is left out."""
        self.new()
        return [record for _, record in sorted(self._records.items())]

    def new(self) -> list[Record]:
        """Return the records that have become whole since the last call, or all of them if a file
        was written anew."""
        paths = [home / "metrics.jsonl" for home in shards.homes(self.run)]
        if self._joined.parts != len(paths) or any(map(self._rewritten, paths)):
            self._joined, self._records, self._files = Joined(len(paths)), {}, {}
        parts = [(part, record) for part, path in enumerate(paths) for record in self._new(path)]
        parts.sort(key=lambda one: one[1]["version"])
        wholes = [whole for part, record in parts for whole in self._joined.add(part, record)]
        kept = [
            {name: value for name, value in whole.items() if self._keep(name)} for whole in wholes
        ]
        self._records |= {
            int(whole["version"]): record for whole, record in zip(wholes, kept, strict=True)
        }
        return kept

    def _rewritten(self, path: Path) -> bool:
        """Whether a file that was read is another one by now, as when the run is resumed."""
        if path not in self._files or not path.exists():
            return False
        (file, at), found = self._files[path], path.stat()
        return found.st_ino != file or found.st_size < at

    def _new(self, path: Path) -> list[Record]:
        records: list[Record] = []
        with contextlib.suppress(OSError), path.open("rb") as file:
            found = os.fstat(file.fileno())
            _, at = self._files.get(
                path, (0, max(0, found.st_size - self._tail) if self._tail else 0)
            )
            file.seek(at)
            whole, end, _ = file.read().rpartition(b"\n")
            self._files[path] = found.st_ino, at + len(whole) + len(end)
            for _, record in parsed(whole):
                if UPDATE in record and record.get("version") is not None:
                    records.append({k: value for k, value in record.items() if value is not None})
        return records
