"""One record per update and per evaluation: a line of RUN/metrics.jsonl, which is the source of
truth, TensorBoard scalars, and a line for the launcher, which shows it. The trackers
(scheduler/telemetry/tracking.py) read the file; scheduler/telemetry/exporter.py reads ``Metrics.newest``.

Of several schedulers, each writes its own file, and the first one shows the run: TensorBoard and
``newest`` have an update's record when all schedulers have recorded that update."""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.frontier import Frontier
from coppice.scheduler.dispatch.calls import STARTED, Event, Worker
from coppice.scheduler.ledger.records import UPDATE, Reader, parsed
from coppice.scheduler.telemetry.board import Board


class Seen(msgspec.Struct, frozen=True):
    """A worker's counters at its heartbeat of time ``at``. new: their growth since the call before;
    rates: the same per second."""

    at: float
    stats: dict[str, float]
    new: dict[str, float] = {}
    rates: dict[str, float] = {}


def _grown(worker: Worker, before: Seen | None) -> Seen:
    """The worker's counters now. If no heartbeat came since ``before``, they keep the earlier
    rates."""
    if before is None:
        return Seen(worker.beat_at, worker.stats)
    if worker.beat_at <= before.at:
        return Seen(before.at, before.stats, {}, before.rates)
    new = {
        name: max(0.0, value - before.stats.get(name, 0.0)) for name, value in worker.stats.items()
    }
    rates = {name: value / (worker.beat_at - before.at) for name, value in new.items()}
    return Seen(worker.beat_at, worker.stats, new, rates)


def _busy(seen: Sequence[Seen]) -> float | None:
    """The mean busy share, or None without rates. Engines that add up concurrent requests may
    exceed 1 and then count as 1."""
    shares = [min(1.0, one.rates.get("busy_s", 0.0)) for one in seen if one.rates]
    return sum(shares) / len(shares) if shares else None


_KINDS = {
    "generate": "actors",
    "judge": "judges",
    "player": "players",
    "speaker": "speakers",
    "retrieve": "retriever",
}
"""The summary's name for the workers that offer a service."""


def _rate(seen: Sequence[Seen], counter: str) -> float | None:
    """The growth of ``counter`` per second over all workers, or None without rates."""
    rates = [one.rates.get(counter, 0.0) for one in seen if one.rates]
    return sum(rates) if rates else None


class Metrics:
    """Writes the records of a run until ``close``. ``counters`` turns worker statistics into
    differences between updates. newest: the newest value of each metric. whole: whether this is the
    first of several schedulers, whose updates' records are joined; ``look`` must then be called now
    and then."""

    def __init__(self, run: Path, whole: bool = False):
        self.run, self._path = run, run / "metrics.jsonl"
        self._file = self._path.open("ab")
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a record was cut off by a crash
        self._board = Board(run / "tensorboard")
        self._trace = (run / "trace.jsonl").open("ab")
        self._start = time.monotonic()
        epoch = {"epoch": time.time()}
        self._traced("i", STARTED, "scheduler", "scheduler", self._start, s="g", args=epoch)
        self._seen: dict[str, Seen] = {}
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._watched: defaultdict[str, float] = defaultdict(float)
        self.newest: dict[str, float] = {}
        self._reader = Reader(run) if whole else None
        self._unshown: set[int] = set()

    def last(self, names: Sequence[str]) -> dict[str, int]:
        """The newest counts of the given names that earlier starts of this run recorded; 0 if there
        are none."""
        counts = dict.fromkeys(names, 0)
        for _, record in parsed(self._path.read_bytes()):
            counts |= {k: max(counts[k], int(record.get(f"count/{k}") or 0)) for k in names}
        return counts

    def resume(self, frontier: Frontier, newest: int) -> set[int]:
        """Leave exactly one record of each update, and return the versions that have one. newest:
        the learner's version; later ones are lost with their weights. An update whose record a
        crash lost gets the learner's metrics, if the checkpoint has them, and the time of the
        record before."""
        lines: dict[tuple[int, bool, int], bytes] = {}
        times = {0: 0.0}
        for number, (line, record) in enumerate(parsed(self._path.read_bytes())):
            version, update = int(record["version"] or 0), UPDATE in record
            if version <= newest:
                lines[version, not update, 0 if update else number] = line
                times[version] = record.get("time/run") or 0.0
        for version, metrics in frontier.records.items():
            time_before = times[max(known for known in times if known <= version)]
            values = {"version": version, "time/run": time_before, **metrics}
            lines.setdefault((version, False, 0), msgspec.json.encode(values))
        self._file.close()
        write_whole(self._path, b"".join(lines[key] + b"\n" for key in sorted(lines)))
        self._file = self._path.open("ab")
        self._board.restart(newest + 1)
        return {version for version, evaluation, _ in lines if not evaluation}

    def record(self, version: int, values: dict[str, float]) -> None:
        """Write one record."""
        values = {"version": float(version), "time/run": time.monotonic() - self._start, **values}
        line = msgspec.json.encode(values)
        self._file.write(line + b"\n")
        self._file.flush()
        if self._reader is not None and UPDATE in values:
            self._unshown.add(version)
        else:
            self._show(values)
        self.look()
        print(line.decode(), flush=True)

    def look(self) -> bool:
        """Show the updates that all schedulers have recorded by now. Return whether none is left
        that the others have yet to record."""
        for record in self._reader.new() if self._reader is not None and self._unshown else ():
            if int(record["version"]) in self._unshown:
                self._unshown.discard(int(record["version"]))
                self._show(record)
        return not self._unshown

    def _show(self, record: dict[str, float]) -> None:
        # another object: the exporter's thread may be reading the one before
        self.newest = self.newest | record
        self._board.record(int(record["version"]), record)

    def counters(self, workers: Sequence[Worker]) -> dict[str, float]:
        """Metrics from the heartbeats that came since the last call.

        Shares and rates refer to the time between a worker's heartbeats. A worker without a new
        heartbeat keeps its last rates, and it has none before its second heartbeat. A metric that
        no worker has is absent.
        """
        before = self._seen
        self._seen = {
            worker.admission: _grown(worker, before.get(worker.admission))
            for worker in workers
            if worker.stats
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
            "busy/engines": float(sum(bool(engine.rates) for engine in engines)),
            "busy/learner": _busy(learners),
            "rate/decoded_tokens": _rate(engines, "decoded_tokens"),
            "rate/learner_tokens": _rate(learners, "learner/forwarded_tokens"),
            "cache/tokens_saved": saved,
            "cache/prefilled_over_ideal": prefilled / max(1.0, ideal),
            "cache/ideal_tokens": ideal,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _add_busy(self, worker: Worker, seen: Seen, since: float) -> None:
        busy = [seconds for name, seconds in seen.new.items() if name.endswith("busy_s")]
        for kind in (
            {_KINDS.get(service.split(".")[0]) for service in worker.hello.services} if busy else ()
        ):
            if kind is not None:
                self._busy[kind] += min(seen.at - since, sum(busy))
                self._watched[kind] += seen.at - since

    def busy(self) -> dict[str, float]:
        """The busy share per kind of worker, over all the time between the heartbeats that
        ``counters`` has seen."""
        return {kind: self._busy[kind] / watched for kind, watched in self._watched.items()}

    def _of(self, workers: Sequence[Worker], service: str) -> list[Seen]:
        """The counters of the workers that offer ``service``."""
        offering = [worker.admission for worker in workers if service in worker.hello.services]
        return [self._seen[admission] for admission in offering if admission in self._seen]

    def event(self, event: Event) -> None:
        """Write one attempt of a call as a Chrome trace event; trace viewers open the file. for:
        the caller; version: the one in the answer; phases: seconds."""
        phases = {name: round(seconds, 6) for name, seconds in event.phases.items()}
        known = {
            "outcome": event.outcome,
            "for": event.caller,
            "version": event.version,
            "phases": phases,
        }
        args = {name: value for name, value in known.items() if value not in ("", None, {})}
        service, length = event.service, (event.end - event.start) * 1e6
        self._traced("X", service, event.worker, service, event.start, dur=length, args=args)

    def _traced(self, ph: str, name: str, pid: str, tid: str, at: float, **more: object) -> None:
        """Write a line of the trace with the names of Chrome's format. at: monotonic seconds."""
        row = {"name": name, "ph": ph, "pid": pid, "tid": tid, "ts": at * 1e6, **more}
        self._trace.write(msgspec.json.encode(row) + b",\n")

    def close(self) -> None:
        """Flush and close all files."""
        self.look()
        self._file.close()
        self._trace.close()
        self._board.close()
