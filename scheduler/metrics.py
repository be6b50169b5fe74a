"""One record an update: RUN/metrics.jsonl, TensorBoard scalars, and a line of the live table."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from scheduler.dispatch import Event, Worker

# The generated protobuf modules define their messages at import, which a type checker cannot see.
_Scalars: Any = vars(event_pb2)["Event"]
_Summary: Any = vars(summary_pb2)["Summary"]

_COLUMNS = [
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
"""Heading, metric and format of the live table; a column is shown once a record has it. judged is the share of judgements that could be
read, search the searches of a trajectory. engine and learner are busy shares of wall time, per process; cache is the share of prompt
tokens served from the prefix cache (docs/placement.md), saved their number."""


class Metrics:
    """Writes records; ``counters`` turns worker statistics into differences between updates."""

    def __init__(self, run: Path):
        self._path = run / "metrics.jsonl"
        self._file = self._path.open("ab")
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a record was cut off by a crash
        self._board = EventFileWriter(str(run / "tensorboard"), flush_secs=5)
        self._trace = (run / "trace.jsonl").open("ab")
        self._start = self._last = time.monotonic()
        self._before: Counter[str] = Counter()
        self._lines = 0
        self._columns: set[str] = set()

    def last(self, names: Sequence[str]) -> dict[str, int]:
        """The newest recorded counts ``names`` of an earlier part of this run; 0 where there is none."""
        found = dict.fromkeys(names, 0)
        for line in self._path.read_bytes().splitlines():
            try:
                record = msgspec.json.decode(line, type=dict[str, float])
            except msgspec.DecodeError:
                continue  # cut off by a crash
            found |= {name: max(found[name], int(record.get(f"count/{name}", 0))) for name in names}
        return found

    def record(self, version: int, values: dict[str, float], show: bool = True) -> None:
        """Store one record and show its line."""
        values = {"version": float(version), "time/run": time.monotonic() - self._start, **values}
        self._file.write(msgspec.json.encode(values) + b"\n")
        self._file.flush()
        scalars = [_Summary.Value(tag=name, simple_value=value) for name, value in values.items() if name != "version"]
        self._board.add_event(_Scalars(wall_time=time.time(), step=version, summary=_Summary(value=scalars)))
        if show:
            self._show(values)

    def _show(self, values: dict[str, float]) -> None:
        self._columns |= {key for _, key, _ in _COLUMNS if key in values}
        columns = [column for column in _COLUMNS if column[1] in self._columns]
        if self._lines % 20 == 0:
            print("  ".join(f"{name:>7}" for name, _, _ in columns), flush=True)
        self._lines += 1
        cells = [form.format(values[key]) if key in values else "-" for _, key, form in columns]
        widths = [max(7, len(name)) for name, _, _ in columns]
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)

    def counters(self, workers: Sequence[Worker]) -> dict[str, float]:
        """Rates and shares since the last call, from the workers' heartbeats."""
        now = time.monotonic()
        wall, self._last = max(1e-6, now - self._last), now
        totals: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for worker in workers:
            kind = (
                "engine"
                if "generate" in worker.hello.services
                else "learner"
                if "train" in worker.hello.services
                else ""
            )
            kinds[kind] += 1
            totals.update({f"{kind}/{name}": value for name, value in worker.stats.items()})
        # A worker that was restarted begins at zero: negative differences count as none.
        new = {name: max(0.0, value - self._before[name]) for name, value in totals.items()}
        self._before = totals
        return {
            "busy/engine": new.get("engine/busy_s", 0.0) / wall / max(1, kinds["engine"]),
            "busy/learner": new.get("learner/busy_s", 0.0) / wall,
            "rate/decoded_tokens": new.get("engine/decoded_tokens", 0.0) / wall,
            "rate/learner_tokens": new.get("learner/learner/forwarded_tokens", 0.0) / wall,
            "cache/tokens_saved": new.get("engine/cached_tokens", 0.0),
            "cache/prefilled_over_ideal": new.get("engine/prefilled_tokens", 0.0)
            / max(1.0, new.get("engine/ideal_prefill_tokens", 0.0)),
        }

    def event(self, event: Event) -> None:
        """One attempt of a call as a Chrome trace event (``tools`` of the field open the file)."""
        row = {
            "name": event.service,
            "ph": "X",
            "pid": event.worker,
            "tid": event.service,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"outcome": event.outcome},
        }
        self._trace.write(msgspec.json.encode(row) + b",\n")

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        self._trace.close()
        self._board.close()
