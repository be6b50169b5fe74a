"""One record per update and evaluation: a line of RUN/metrics.jsonl, the source of truth,
TensorBoard scalars, and a line for the launcher. Of several schedulers each writes its own file,
and the first shows an update when all have recorded it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from coppice.common.atomic import write_whole
from coppice.common.frontier import Frontier
from coppice.scheduler.dispatch.calls import STARTED, Event, Worker
from coppice.scheduler.dispatch.placement import SPARE
from coppice.scheduler.ledger.records import UPDATE, Reader, parsed

# The generated protobuf modules define their messages at import, which a type checker cannot see.
_BoardEvent: Any = vars(event_pb2)["Event"]
_Session: Any = vars(event_pb2)["SessionLog"]
_Summary: Any = vars(summary_pb2)["Summary"]


class Counters(msgspec.Struct, frozen=True):
    """A worker's counters at the heartbeat of time ``at``, their growth, and that per second."""

    at: float
    stats: dict[str, float]
    new: dict[str, float] = {}
    rates: dict[str, float] = {}


class Metrics:
    """Writes the records until ``close``. newest: the newest value of each metric. whole: whether
    this is the first of several schedulers, whose records it joins; then call ``look`` now and
    then. on_record: told of each record of the run."""

    on_record: Callable[[dict[str, float]], None] = staticmethod(lambda record: None)

    def __init__(self, run: Path, whole: bool = False):
        self.run, self._path = run, run / "metrics.jsonl"
        self._file = self._path.open("ab")
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a record was cut off by a crash
        self._board = EventFileWriter(str(run / "tensorboard"), flush_secs=5)
        self._trace_path = run / "trace.jsonl"
        self._trace = self._trace_path.open("ab")
        self._start = time.monotonic()
        begun = {"ts": self._start * 1e6, "args": {"epoch": time.time()}}
        self._trace_line(name=STARTED, ph="i", pid="scheduler", tid="scheduler", s="g", **begun)
        self._counters: dict[str, Counters] = {}
        self.newest: dict[str, float] = {}
        self._reader = Reader(run) if whole else None
        self._unshown: set[int] = set()

    def last(self, names: Sequence[str]) -> dict[str, int]:
        """The newest counts of these names that earlier starts recorded; 0 if there are none."""
        counts = dict.fromkeys(names, 0)
        for _, record in parsed(self._path.read_bytes()):
            if self._reader is None or UPDATE in record:  # evaluations have the sum
                counts |= {k: max(counts[k], int(record.get(f"count/{k}") or 0)) for k in names}
        return counts

    def resume(self, frontier: Frontier, newest: int) -> set[int]:
        """Leave one record of each update up to ``newest``, the learner's version, and return the
        versions that have one. A lost record gets the checkpoint's metrics."""
        lines: dict[tuple[int, bool, int], bytes] = {}
        times = {0: 0.0}
        for number, (line, record) in enumerate(parsed(self._path.read_bytes())):
            version, update = int(record["version"] or 0), UPDATE in record
            if version <= newest:
                lines[version, not update, 0 if update else number] = line
                times[version] = record.get("time/run") or 0.0
        for version, metrics in frontier.records.items():
            time_before = times[max(earlier for earlier in times if earlier <= version)]
            values = {"version": version, "time/run": time_before, **metrics}
            lines.setdefault((version, False, 0), msgspec.json.encode(values))
        self._file.close()
        whole = b"".join(lines[key] + b"\n" for key in sorted(lines))
        write_whole(self._path, whole, durable=True)
        self._file = self._path.open("ab")
        # TensorBoard drops the points from there on, which a crash took back
        log = _Session(status=_Session.START)
        self._board.add_event(_BoardEvent(wall_time=time.time(), step=newest + 1, session_log=log))
        return {version for version, evaluation, _ in lines if not evaluation}

    def record(self, version: int, values: dict[str, float]) -> None:
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
        """Show updates that all schedulers have recorded. Return whether none is left."""
        for record in self._reader.new() if self._reader is not None and self._unshown else ():
            if int(record["version"]) in self._unshown:
                self._unshown.discard(int(record["version"]))
                self._show(record)
        return not self._unshown

    def _show(self, record: dict[str, float]) -> None:
        # another object: the exporter's thread may be reading the one before
        self.newest = self.newest | record
        step = int(record["version"])
        shown = {name: value for name, value in record.items() if name != "version"}
        summary = _Summary(value=[_Summary.Value(tag=k, simple_value=v) for k, v in shown.items()])
        self._board.add_event(_BoardEvent(wall_time=time.time(), step=step, summary=summary))
        self.on_record(record)

    def counters(self, workers: Sequence[Worker]) -> dict[str, float]:
        """Metrics from the heartbeats since the last call, over the time between a worker's
        heartbeats. A worker without a new one keeps its rates."""
        now = dict[str, Counters]()
        for worker in workers:
            if (before := self._counters.get(worker.admission)) is None:
                if worker.stats:
                    now[worker.admission] = Counters(worker.beat_at, worker.stats)
            elif (seconds := worker.beat_at - before.at) <= 0:
                now[worker.admission] = msgspec.structs.replace(before, new={})
            else:
                old = before.stats.get
                new = {name: max(0.0, v - old(name, 0.0)) for name, v in worker.stats.items()}
                rates = {name: growth / seconds for name, growth in new.items()}
                now[worker.admission] = Counters(worker.beat_at, worker.stats, new, rates)
        self._counters = now

        def offering(service: str) -> list[Counters]:
            those = (worker.admission for worker in workers if service in worker.hello.services)
            return [now[admission] for admission in those if admission in now]

        def per_second(those: list[Counters], counter: str) -> list[float]:
            return [one.rates.get(counter, 0.0) for one in those if one.rates]

        engines, ranks = offering("generate"), offering("train")
        usual = [one for one in engines if not one.stats.get(SPARE)] or engines
        names = "prefilled_tokens", "ideal_prefill_tokens", "cached_tokens"
        prefilled, ideal, saved = (sum(e.new.get(name, 0.0) for e in engines) for name in names)
        values = {"busy/engines": float(len(per_second(usual, "busy_s")))}
        values["cache/tokens_saved"] = saved
        if ideal:  # servers do not tell it
            values |= {"cache/prefilled_over_ideal": prefilled / ideal, "cache/ideal_tokens": ideal}
        for name, those in (("busy/engine", usual), ("busy/learner", ranks)):
            # engines that add up concurrent requests may exceed 1
            if shares := [min(1.0, share) for share in per_second(those, "busy_s")]:
                values[name] = sum(shares) / len(shares)
        if decoded := per_second(engines, "decoded_tokens"):
            values["rate/decoded_tokens"] = sum(decoded)
        if learnt := per_second(ranks, "learner/forwarded_tokens"):
            values["rate/learner_tokens"] = sum(learnt)
        return values

    def event(self, event: Event) -> None:
        """Write one attempt of a call as a line of Chrome's trace format, in microseconds."""
        args = {
            "outcome": event.outcome,
            "for": event.caller,
            "version": event.version,
            "phases": {name: round(seconds, 6) for name, seconds in event.phases.items()},
        }
        args = {name: value for name, value in args.items() if value not in ("", None, {})}
        place = {"name": event.service, "ph": "X", "pid": event.worker, "tid": event.service}
        length = (event.end - event.start) * 1e6
        self._trace_line(**place, ts=event.start * 1e6, dur=length, args=args)

    def rotate(self, version: int, keep: int) -> None:
        """Begin another trace file at every ``keep``-th version, and remove the files that ended
        at least ``keep`` versions ago."""
        ended = self.run / f"trace-{version:06d}.jsonl"
        if version % keep == 0 and not ended.exists():  # a resume may come by a version again
            self._trace.close()
            self._trace_path.rename(ended)
            self._trace = self._trace_path.open("ab")
            for old in self.run.glob("trace-??????.jsonl"):
                if int(old.stem[6:]) <= version - keep:
                    old.unlink()

    def _trace_line(self, **row: object) -> None:
        self._trace.write(msgspec.json.encode(row) + b",\n")

    def close(self) -> None:
        self.look()
        self._file.close()
        self._trace.close()
        self._board.close()
