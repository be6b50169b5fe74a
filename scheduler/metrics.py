"""One record per update: a line of RUN/metrics.jsonl, TensorBoard scalars, and a line of the live table."""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from scheduler.calls import STARTED, Event, Worker
from scheduler.terminal import width
from wire.atomic import write_whole
from wire.frontier import Frontier

# The generated protobuf modules define their messages at import, which a type checker cannot see.
_Scalars: Any = vars(event_pb2)["Event"]
_Session: Any = vars(event_pb2)["SessionLog"]
_Summary: Any = vars(summary_pb2)["Summary"]

UPDATE = "learner/groups"
"""The metric that every update's record has, and no evaluation's."""

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
"""Heading, metric and format of the live table's columns. A column is shown once a record has its metric. judged: the valid share of the
judge's scores; search: searches per trajectory; engine and learner: busy shares of wall time per process; cache and saved: the share and
the number of prompt tokens that the prefix cache served (docs/placement.md)."""
_LEAST = ("saved", "judged", "turns", "think", "cache", "outcome", "search", "tok/s")
"""Columns that a narrow terminal leaves out, in this order; metrics.jsonl has them all."""


def _that_fit(columns: list[tuple[str, str, str]], width: int) -> list[tuple[str, str, str]]:
    """Leave out the least important columns until a line is at most ``width`` wide: each cell has seven characters, with two between."""
    for least in _LEAST:
        if 9 * len(columns) - 2 <= width:
            break
        columns = [column for column in columns if column[0] != least]
    return columns


class Seen(msgspec.Struct, frozen=True):
    """A worker's counters at its heartbeat of time ``at``. new: their growth since the call before; rates: the same per second."""

    at: float
    stats: dict[str, float]
    new: dict[str, float] = {}
    rates: dict[str, float] = {}


def _grown(worker: Worker, before: Seen | None) -> Seen:
    """The worker's counters now. If no heartbeat came since ``before``, they keep the earlier rates."""
    if before is None:
        return Seen(worker.beat_at, worker.stats)
    if worker.beat_at <= before.at:
        return Seen(before.at, before.stats, {}, before.rates)
    new = {name: max(0.0, value - before.stats.get(name, 0.0)) for name, value in worker.stats.items()}
    rates = {name: value / (worker.beat_at - before.at) for name, value in new.items()}
    return Seen(worker.beat_at, worker.stats, new, rates)


def _busy(seen: Sequence[Seen]) -> float | None:
    """The mean busy share, or None without rates. Engines that add up concurrent requests may exceed 1 and then count as 1."""
    shares = [min(1.0, one.rates.get("busy_s", 0.0)) for one in seen if one.rates]
    return sum(shares) / len(shares) if shares else None


_KINDS = {"generate": "actors", "judge": "judges", "player": "players", "speaker": "speakers", "retrieve": "retriever"}
"""The summary's name for the workers that offer a service."""


def _rate(seen: Sequence[Seen], counter: str) -> float | None:
    """The growth of ``counter`` per second over all workers, or None without rates."""
    rates = [one.rates.get(counter, 0.0) for one in seen if one.rates]
    return sum(rates) if rates else None


class Metrics:
    """Writes the records of a run until ``close``. ``counters`` turns worker statistics into differences between updates."""

    def __init__(self, run: Path):
        self.run, self._path = run, run / "metrics.jsonl"
        self._file = self._path.open("ab")
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a record was cut off by a crash
        self._board = EventFileWriter(str(run / "tensorboard"), flush_secs=5)
        self._trace = (run / "trace.jsonl").open("ab")
        self._start = time.monotonic()
        began = {"name": STARTED, "ph": "i", "pid": "scheduler", "tid": "scheduler", "ts": self._start * 1e6, "s": "g"}
        self._trace.write(msgspec.json.encode(began) + b",\n")
        self._seen: dict[str, Seen] = {}
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._watched: defaultdict[str, float] = defaultdict(float)
        self._lines = 0
        self._columns: set[str] = set()

    def last(self, names: Sequence[str]) -> dict[str, int]:
        """The newest counts of the given names that earlier starts of this run recorded; 0 if there are none."""
        counts = dict.fromkeys(names, 0)
        for line in self._path.read_bytes().splitlines():
            try:
                record = msgspec.json.decode(line, type=dict[str, float])
            except msgspec.DecodeError:
                continue  # the line was cut off by a crash
            counts |= {name: max(counts[name], int(record.get(f"count/{name}", 0))) for name in names}
        return counts

    def resume(self, frontier: Frontier, newest: int) -> set[int]:
        """Leave exactly one record of each update, and return the versions that have one. newest: the learner's version; later ones are lost with
        their weights. An update whose record a crash lost gets the learner's metrics, if the checkpoint has them, and the time of the record
        before."""
        lines: dict[tuple[int, bool, int], bytes] = {}
        times = {0: 0.0}
        for number, line in enumerate(self._path.read_bytes().splitlines()):
            try:
                record = msgspec.json.decode(line, type=dict[str, float])
            except msgspec.DecodeError:
                continue  # the line was cut off by a crash
            version, update = int(record["version"]), UPDATE in record
            if version <= newest:
                lines[version, not update, 0 if update else number] = line
                times[version] = record.get("time/run", 0.0)
        for version, metrics in frontier.records.items():
            time_before = times[max(known for known in times if known <= version)]
            values = {"version": version, "time/run": time_before, **metrics}
            lines.setdefault((version, False, 0), msgspec.json.encode(values))
        self._file.close()
        write_whole(self._path, b"".join(lines[key] + b"\n" for key in sorted(lines)))
        self._file = self._path.open("ab")
        # TensorBoard then drops the points of the lost updates.
        start = _Session(status=_Session.START)
        self._board.add_event(_Scalars(wall_time=time.time(), step=newest + 1, session_log=start))
        return {version for version, evaluation, _ in lines if not evaluation}

    def record(self, version: int, values: dict[str, float], show: bool = True) -> None:
        """Write one record, and print its line of the live table if ``show``."""
        values = {"version": float(version), "time/run": time.monotonic() - self._start, **values}
        self._file.write(msgspec.json.encode(values) + b"\n")
        self._file.flush()
        scalars = [_Summary.Value(tag=name, simple_value=value) for name, value in values.items() if name != "version"]
        self._board.add_event(_Scalars(wall_time=time.time(), step=version, summary=_Summary(value=scalars)))
        if show:
            self._show(values)

    def _show(self, values: dict[str, float]) -> None:
        known = self._columns
        self._columns = known | {key for _, key, _ in COLUMNS if key in values}
        columns = _that_fit([column for column in COLUMNS if column[1] in self._columns], width())
        if self._lines % 20 == 0 or self._columns != known:
            print("  ".join(f"{name:>7}" for name, _, _ in columns), flush=True)
        self._lines += 1
        cells = [form.format(values[key]) if key in values else "-" for _, key, form in columns]
        print("  ".join(f"{cell:>7}" for cell in cells), flush=True)

    def counters(self, workers: Sequence[Worker]) -> dict[str, float]:
        """Metrics from the heartbeats that came since the last call.

        Shares and rates refer to the time between a worker's heartbeats. A worker without a new heartbeat keeps its last rates, and it
        has none before its second heartbeat. A metric that no worker has is absent.
        """
        before = self._seen
        self._seen = {
            worker.admission: _grown(worker, before.get(worker.admission)) for worker in workers if worker.stats
        }
        for worker in workers:
            if worker.admission in before:
                self._add_busy(worker, self._seen[worker.admission], before[worker.admission].at)
        engines, learners = (self._of(workers, service) for service in ("generate", "train"))
        prefilled, ideal, saved = (
            sum(engine.new.get(name, 0.0) for engine in engines)
            for name in ("prefilled_tokens", "ideal_prefill_tokens", "cached_tokens")
        )
        values = {
            "busy/engine": _busy(engines),
            "busy/learner": _busy(learners),
            "rate/decoded_tokens": _rate(engines, "decoded_tokens"),
            "rate/learner_tokens": _rate(learners, "learner/forwarded_tokens"),
            "cache/tokens_saved": saved,
            "cache/prefilled_over_ideal": prefilled / max(1.0, ideal),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _add_busy(self, worker: Worker, seen: Seen, since: float) -> None:
        busy = [seconds for name, seconds in seen.new.items() if name.endswith("busy_s")]
        for kind in {_KINDS.get(service.split(".")[0]) for service in worker.hello.services} if busy else ():
            if kind is not None:
                self._busy[kind] += min(seen.at - since, sum(busy))
                self._watched[kind] += seen.at - since

    def busy(self) -> dict[str, float]:
        """The busy share per kind of worker, over all the time between the heartbeats that ``counters`` has seen."""
        return {kind: self._busy[kind] / watched for kind, watched in self._watched.items()}

    def _of(self, workers: Sequence[Worker], service: str) -> list[Seen]:
        """The counters of the workers that offer ``service``."""
        offering = [worker.admission for worker in workers if service in worker.hello.services]
        return [self._seen[admission] for admission in offering if admission in self._seen]

    def event(self, event: Event) -> None:
        """Write one attempt of a call as a Chrome trace event; trace viewers open the file. for: the caller; version: the one in the answer."""
        known = {"outcome": event.outcome, "for": event.caller, "version": event.version}
        row = {
            "name": event.service,
            "ph": "X",
            "pid": event.worker,
            "tid": event.service,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {name: value for name, value in known.items() if value not in ("", None)},
        }
        self._trace.write(msgspec.json.encode(row) + b",\n")

    def close(self) -> None:
        """Flush and close all files."""
        self._file.close()
        self._trace.close()
        self._board.close()
