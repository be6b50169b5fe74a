"""What the scheduler knows of a run's health, in ``RUN/health.json``, for the launcher. It is
written every heartbeat: a file that grows old means that the scheduler itself does not answer.
Times that processes of this machine compare are monotonic seconds."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from coppice.common import shards
from coppice.common.atomic import write_whole
from coppice.scheduler.dispatch.calls import Pending, Worker
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.telemetry import terminal

NAME = "health.json"
PAUSED = "paused"
"""While a file of this name is in the run's folder, no new tree is admitted. ``Reporter`` looks for
it every heartbeat."""
LEARNING = ("train", "close")
"""The learner's services. Their calls stay open while no tree grows, because an update needs
several trees."""
REMEMBERED = 64
"""The number of workers that have left and are reported, those that left last: judges of
``coppice serve`` may come and go under ever new names."""
TICK_S = 0.25
"""The interval of the timer that measures the event loop's lag."""
UNANSWERED = 3
"""A worker that let so many calls in a row pass their deadline, and answered none meanwhile, is
stuck although its heartbeats come."""


class WorkerHealth(msgspec.Struct, frozen=True):
    """A worker. heard: when its last message came (monotonic seconds). state: "here", or why it
    left. calls: its last calls, in words."""

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


class Queue(msgspec.Struct, frozen=True):
    """The open calls of a service. on: the workers that have them. since: when the oldest began
    (monotonic); caller: who waits for it. offered: the number of workers that offer the service."""

    running: int
    waiting: int
    offered: int
    since: float
    caller: str
    on: list[str]

    def describe(self, service: str, now: float) -> str:
        """The queue in words."""
        where = f"none runs ({self.offered} workers offer it)"
        if self.on:
            where = f"{self.running} at {', '.join(self.on)}"
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        caller = f", for {self.caller}" if self.caller else ""
        return f"{service}: {where}{waiting}; the oldest since {now - self.since:.0f} s{caller}"


class Health(msgspec.Struct, frozen=True):
    """One report. pid: the scheduler's. at, progress_at: monotonic seconds of the report and of the
    last node, group or update. time: seconds of the epoch. began: whether a learner has joined.
    done: training trees that ended; evaluations: those in the journal. stuck: the worker that
    everything waits for if nothing moves ("" for the scheduler itself). fault: the last fault of a
    service, with its time. lag_s: the longest that the scheduler's event loop kept a timer waiting
    since the report before, in seconds. paused: whether no new tree is admitted."""

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
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=Health)
    except (OSError, msgspec.DecodeError):
        return None


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
                worker = msgspec.structs.replace(
                    worker,
                    heard=max(worker.heard, before.heard),
                    in_flight=worker.in_flight + before.in_flight,
                )
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
        on = [call.attempt.worker.name for call in each if call.attempt is not None]
        offered, waiting = len(dispatcher.workers(service)), len(each) - len(on)
        queues[service] = Queue(
            len(on), waiting, offered, oldest.since, oldest.caller, sorted(set(on))
        )
    return queues


def _stuck(calls: Iterable[Pending]) -> str:
    """The worker with the oldest attempt. The learner waits for others, so it comes last."""
    attempts = [call.attempt for call in calls if call.attempt is not None]
    others = [attempt for attempt in attempts if attempt.pending.service not in LEARNING]
    oldest = min(others or attempts, key=lambda attempt: attempt.start, default=None)
    return oldest.worker.name if oldest is not None else ""


def _worker(worker: Worker, now: float, state: str = "here") -> WorkerHealth:
    calls = [
        f"{event.service}{f' for {event.caller}' if event.caller else ''}: {event.outcome} after {event.end - event.start:.1f} s"
        for event in worker.recent
    ]
    calls += [
        f"{a.pending.service} for {a.pending.caller}: open since {now - a.start:.1f} s"
        for a in itertools.islice(worker.in_flight.values(), 2)
    ]
    hello = worker.hello
    return WorkerHealth(
        worker.name, hello.pid, hello.host, list(hello.services), worker.heard, state, len(worker.in_flight),
        hello.capacity, worker.answered, worker.unanswered, calls,
    )  # fmt: skip


class Progress(msgspec.Struct, frozen=True):
    """The run's part of a report. marks: a counter that changes with every progress."""

    phase: str
    version: int
    updates: int
    growing: int
    done: int
    evaluations: int
    marks: int


class Reporter:
    """Writes the reports, and says on the terminal when nothing has moved for ``watchdog_s``.
    order: the file that pauses the run, if it is not in the folder of the reports."""

    def __init__(
        self,
        run: Path,
        dispatcher: Dispatcher,
        progress: Callable[[], Progress],
        watchdog_s: float,
        stall_s: float,
        order: Path | None = None,
    ):
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
        """A worker is here."""
        self._gone.pop(worker.name, None)
        self.began = self.began or "train" in worker.hello.services

    def left(self, worker: Worker, reason: str) -> None:
        """A worker is gone. It is remembered until one of its name joins, since it may be stuck."""
        self._gone[worker.name] = _worker(worker, self.dispatcher.clock(), reason)
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def failed(self, service: str, fault: Exception) -> None:
        """A call of ``service`` failed."""
        self.fault = time.time(), f"{service}: {fault}"

    async def work(self) -> None:
        """Write a report every heartbeat."""
        while True:
            self._pause(await asyncio.to_thread(self.order.is_file))
            self._remind(await self.write())
            self._lag_s = await _longest_delay(self.dispatcher.config.heartbeat_s)

    async def write(self) -> Health:
        """Write the report of this moment, and return it. A full disk is the journal's to tell."""
        report = self.newest = self.report(self.dispatcher.clock())
        with contextlib.suppress(OSError):
            await asyncio.to_thread(write_whole, self.run / NAME, msgspec.json.encode(report))
        return report

    def _pause(self, paused: bool) -> None:
        # the first scheduler says it for all
        if paused != self.paused and self.order.parent == self.run:
            terminal.say(
                f"paused: no new tree begins; trees in flight finish (resume with coppice watch, or remove {self.order})"
                if paused
                else "resumed"
            )
        self.paused = paused

    def report(self, now: float) -> Health:
        """The report of this moment. now: monotonic seconds. A paused run stands still on purpose
        as soon as only the learner's calls are open."""
        progress, workers = self.progress(), list(self.dispatcher.roster.everyone())
        calls = self.dispatcher.open_calls()
        learnt = [
            (w.stats.get("passes", 0.0), w.stats.get("updates", 0.0))
            for w in workers
            if "train" in w.hello.services
        ]
        marks = progress.phase, progress.marks, *learnt
        idle = self.paused and all(call.service in LEARNING for call in calls)
        if marks != self._marks or idle:
            self._marks, self._progress_at = marks, now
        return Health(
            os.getpid(), socket.gethostname(), now, time.time(), progress.phase, progress.version, progress.updates,
            self.began, progress.growing, progress.done, progress.evaluations, self._progress_at, _stuck(calls),
            _queues(calls, self.dispatcher), [_worker(w, now) for w in workers] + list(self._gone.values()),
            self.dispatcher.config.replace_after_s, self.stall_s, self.fault, self._lag_s, self.paused,
        )  # fmt: skip

    def _remind(self, report: Health) -> None:
        if report.at - max(report.progress_at, self._said_at) > self.watchdog_s:
            self._said_at = report.at
            waits = "; ".join(report.waits()) or "no call is open"
            idle = report.at - report.progress_at
            terminal.say(f"  no progress for {idle:.0f} s ({report.phase}): {waits}")


async def _longest_delay(seconds: float) -> float:
    """Sleep, and return the longest delay of a timer meanwhile, in seconds."""
    loop, longest = asyncio.get_running_loop(), 0.0
    end = loop.time() + seconds
    while (start := loop.time()) < end:
        pause = min(TICK_S, end - start)
        await asyncio.sleep(pause)
        longest = max(longest, loop.time() - start - pause)
    return longest
