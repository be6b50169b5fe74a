"""The scheduler's report of a run's health in ``RUN/health.json``, written every heartbeat: an old
file means that the scheduler itself does not answer. Times are monotonic seconds."""

import asyncio
import contextlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import shards
from coppice.common.atomic import write_whole
from coppice.common.jsonl import readable
from coppice.scheduler.dispatch.calls import Pending, Worker
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.telemetry import alerts

NAME = "health.json"
PAUSED = "paused"
"""While a file of this name is in the run's folder, no new tree is admitted."""
LEARNING = ("train", "close")
"""The learner's services. Their calls are open while no tree grows."""
REMEMBERED = 64
"""The most workers that have left and are still reported."""
TICK_S = 0.25
"""The interval of the timer that measures the event loop's lag, in seconds."""
UNANSWERED = 3
"""A worker is stuck, although its heartbeats come, if this many calls in a row passed their
deadline and it answered none meanwhile, or if it stalled in this many periods in a row."""


class WorkerHealth(msgspec.Struct, frozen=True):
    """A worker. heard: when its last message came. state: "here", or why it left. calls: words.
    stalled: see ``scheduler.dispatch.calls.Worker``."""

    name: str
    pid: int
    host: str
    services: list[str]
    heard: float
    state: str
    in_flight: int
    capacity: int
    answered: int
    unanswered: int
    calls: list[str]
    stalled: int = 0


class Queue(msgspec.Struct, frozen=True):
    """The open calls of a service, which ``offered`` workers offer. since: when the oldest call
    began; caller: who waits for it. on: the workers that run the calls."""

    running: int
    waiting: int
    offered: int
    since: float
    caller: str
    on: list[str]

    def describe(self, service: str, now: float) -> str:
        none = f"none runs ({self.offered} workers offer it)"
        where = f"{self.running} at {', '.join(self.on)}" if self.on else none
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        caller = f", for {self.caller}" if self.caller else ""
        return f"{service}: {where}{waiting}; the oldest since {now - self.since:.0f} s{caller}"


class Health(msgspec.Struct, frozen=True):
    """One report. pid: the scheduler's. at, progress_at: when it was made, and when the last node,
    group or update came. time: seconds of the epoch. began: whether a learner has joined. done:
    training trees that ended. stuck: the worker that everything waits for if nothing moves, "" for
    the scheduler itself. fault: the last fault of a service, with its time of the epoch. lag_s: the
    event loop's longest delay of a timer since the report before. paused: no tree is admitted."""

    pid: int
    host: str
    at: float
    time: float
    phase: str
    version: int
    updates: int
    began: bool
    growing: int
    done: int
    evaluations: int
    progress_at: float
    stuck: str
    queues: dict[str, Queue]
    workers: list[WorkerHealth]
    replace_after_s: float
    stall_s: float
    fault: tuple[float, str] | None = None
    lag_s: float = 0.0
    paused: bool = False

    def progress(self) -> int:
        """What the journal keeps of the run's work, whatever dies."""
        return self.done + self.evaluations

    def waits(self) -> list[str]:
        """What waits for what, one line per service."""
        return [queue.describe(service, self.at) for service, queue in self.queues.items()]


def read(run: Path) -> Health | None:
    """Return the newest report of a run, or None if there is none that can be read."""
    return readable(run / NAME, Health)


def read_all(run: Path) -> list[Health]:
    """Return the newest report of every scheduler of a run that has one that can be read."""
    return [report for home in shards.homes(run) if (report := read(home)) is not None]


def joined(reports: Sequence[Health]) -> Health | None:
    """Return one report of all schedulers: everybody's workers and calls, the first one's phase."""
    if len(reports) < 2:
        return reports[0] if reports else None
    queues: dict[str, list[Queue]] = defaultdict(list)
    workers: dict[tuple[str, int, str], WorkerHealth] = {}
    for report in reports:
        for service, queue in report.queues.items():
            queues[service].append(queue)
        for worker in report.workers:
            key = worker.host, worker.pid, worker.name
            if before := workers.get(key):  # the learner answers every scheduler
                both = {"heard": max(worker.heard, before.heard)}
                both |= _sums([worker, before], "in_flight")
                worker = msgspec.structs.replace(worker, **both)
            workers[key] = worker
    return msgspec.structs.replace(
        reports[0],
        **_sums(reports, "growing", "done", "evaluations"),
        progress_at=max(r.progress_at for r in reports),
        lag_s=max(r.lag_s for r in reports),
        paused=all(r.paused for r in reports),
        fault=max((r.fault for r in reports if r.fault), default=None),
        queues={
            service: msgspec.structs.replace(
                min(each, key=lambda queue: queue.since),
                **_sums(each, "running", "waiting", "offered"),
                on=sorted({name for queue in each for name in queue.on}),
            )
            for service, each in queues.items()
        },
        workers=list(workers.values()),
    )


def _sums(parts: Sequence[msgspec.Struct], *names: str) -> dict[str, int]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def _queues(calls: Iterable[Pending], dispatcher: Dispatcher) -> dict[str, Queue]:
    by_service: dict[str, list[Pending]] = defaultdict(list)
    for call in calls:
        by_service[call.service].append(call)
    queues = {}
    for service, each in by_service.items():
        oldest = min(each, key=lambda call: call.since)
        on = [call.attempts[0].worker.name for call in each if call.attempts]
        count = len(on), len(each) - len(on), len(dispatcher.workers(service))
        queues[service] = Queue(*count, oldest.since, oldest.caller, sorted(set(on)))
    return queues


def _stuck(calls: Iterable[Pending]) -> str:
    """The worker with the oldest attempt. The learner waits for others, so it comes last."""
    attempts = [call.attempts[0] for call in calls if call.attempts]
    others = [attempt for attempt in attempts if attempt.pending.service not in LEARNING]
    oldest = min(others or attempts, key=lambda attempt: attempt.start, default=None)
    return oldest.worker.name if oldest is not None else ""


def _worker(worker: Worker, now: float, state: str = "here") -> WorkerHealth:
    calls = [
        (event.service, event.caller, f"{event.outcome} after {event.end - event.start:.1f} s")
        for event in worker.recent
    ]
    calls += [
        (attempt.pending.service, attempt.pending.caller, f"open since {now - attempt.start:.1f} s")
        for attempt in list(worker.in_flight.values())[:2]
    ]
    return WorkerHealth(
        name=worker.name,
        pid=worker.hello.pid,
        host=worker.hello.host,
        services=list(worker.hello.services),
        heard=worker.heard,
        state=state,
        in_flight=len(worker.in_flight),
        capacity=worker.hello.capacity,
        answered=worker.answered,
        unanswered=worker.unanswered,
        calls=[f"{name}{f' for {caller}' * bool(caller)}: {end}" for name, caller, end in calls],
        stalled=worker.stalled,
    )


class Reporter:
    """Writes the reports, and says on the terminal when nothing has moved for ``watchdog_s``
    seconds. progress: the run's fields of a report, and "marks", a counter that changes with every
    progress. order: the file that pauses the run, if it is not in the folder of the reports."""

    def __init__(
        self, run: Path, dispatcher: Dispatcher, progress: Callable[[], dict[str, Any]],
        watchdog_s: float, stall_s: float, order: Path | None = None,
    ):  # fmt: skip
        self.run, self.dispatcher, self.progress = run, dispatcher, progress
        self.order = order or run / PAUSED
        self.watchdog_s, self.stall_s = watchdog_s, stall_s
        self.began = self.paused = False
        self.newest: Health | None = None
        self.fault: tuple[float, str] | None = None
        self._lag_s = 0.0
        self._gone: dict[str, WorkerHealth] = {}
        self._marks: tuple[object, ...] = ()
        self._progress_at = self._said_at = self.dispatcher.clock()

    def joined(self, worker: Worker) -> None:
        self._gone.pop(worker.name, None)
        self.began = self.began or "train" in worker.hello.services

    def left(self, worker: Worker, reason: str) -> None:
        """A worker is gone. It is remembered until one of its name joins, since it may be stuck."""
        self._gone[worker.name] = _worker(worker, self.dispatcher.clock(), reason)
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def failed(self, service: str, fault: Exception) -> None:
        self.fault = time.time(), f"{service}: {fault}"

    async def work(self) -> None:
        """Write a report every heartbeat."""
        while True:
            self._pause(await asyncio.to_thread(self.order.is_file))
            self._remind(await self.write())
            lag_s, loop = 0.0, asyncio.get_running_loop()
            end = loop.time() + self.dispatcher.config.heartbeat_s
            while (start := loop.time()) < end:
                await asyncio.sleep(pause := min(TICK_S, end - start))
                lag_s = max(lag_s, loop.time() - start - pause)
            self._lag_s = lag_s

    async def write(self) -> Health:
        """Write the report of this moment, and return it. A full disk is the journal's to tell."""
        report = self.newest = self.report(self.dispatcher.clock())
        with contextlib.suppress(OSError):
            await asyncio.to_thread(write_whole, self.run / NAME, msgspec.json.encode(report))
        return report

    def _pause(self, paused: bool) -> None:
        # the first scheduler says it for all
        if paused != self.paused and self.order.parent == self.run:
            how = f"resume with coppice watch, or remove {self.order}"
            told = f"paused: no new tree begins; trees in flight finish ({how})"
            alerts.say(told if paused else "resumed")
        self.paused = paused

    def report(self, now: float) -> Health:
        """The report of this moment. now: monotonic seconds. A paused run stands still on purpose
        as soon as only the learner's calls are open."""
        fields, workers = self.progress(), list(self.dispatcher.roster.by_name.values())
        calls = self.dispatcher.open_calls()
        ranks = [w.stats for w in workers if "train" in w.hello.services]
        learnt = [(stats.get("passes", 0.0), stats.get("updates", 0.0)) for stats in ranks]
        marks = fields["phase"], fields.pop("marks"), *learnt
        idle = self.paused and all(call.service in LEARNING for call in calls)
        if marks != self._marks or idle:
            self._marks, self._progress_at = marks, now
        return Health(
            pid=os.getpid(),
            host=socket.gethostname(),
            at=now,
            time=time.time(),
            **fields,
            began=self.began,
            progress_at=self._progress_at,
            stuck=_stuck(calls),
            queues=_queues(calls, self.dispatcher),
            workers=[_worker(w, now) for w in workers] + list(self._gone.values()),
            replace_after_s=self.dispatcher.config.replace_after_s,
            stall_s=self.stall_s,
            fault=self.fault,
            lag_s=self._lag_s,
            paused=self.paused,
        )

    def _remind(self, report: Health) -> None:
        if report.at - max(report.progress_at, self._said_at) > self.watchdog_s:
            self._said_at = report.at
            waits = "; ".join(report.waits()) or "no call is open"
            idle = report.at - report.progress_at
            alerts.say(f"  no progress for {idle:.0f} s ({report.phase}): {waits}")
