"""The scheduler process: evaluate, grow trees under pacing, stream groups, give out new weights,
sum up. ``python -m coppice.scheduler.main PROCESS.json``; ``coppice launch --resume`` continues."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from coppice import scheduler
from coppice.actors.environments import registry
from coppice.common import loop, shards
from coppice.common.concurrency import TaskGroup, gather
from coppice.common.frontier import Frontier
from coppice.common.phases import Phases
from coppice.common.process import begin, starter
from coppice.scheduler.config import UNJUDGED, SchedulerProcess
from coppice.scheduler.dispatch.dispatcher import Dispatcher, Worker
from coppice.scheduler.dispatch.placement import Fleet
from coppice.scheduler.dispatch.weight_sync import WeightSync
from coppice.scheduler.evaluation.examination import WORK, Examination
from coppice.scheduler.garbage import sparing
from coppice.scheduler.growth import dynamic_sampling, tasks
from coppice.scheduler.growth.open_trees import OpenTrees
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger import resume
from coppice.scheduler.ledger.journal import Journal, JournalError
from coppice.scheduler.ledger.pacing import Pacing
from coppice.scheduler.ledger.stream import Stream
from coppice.scheduler.telemetry import alerts, report
from coppice.scheduler.telemetry.alerts import Attendance, Faults, Fruitless, JudgeTally, Reminders
from coppice.scheduler.telemetry.exporter import Exporter
from coppice.scheduler.telemetry.health import PAUSED, Health, Reporter, joined, read_all
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.scheduler.telemetry.tracking import FINISH_S, STOP_S, Trackers
from coppice.wire import published
from coppice.wire.faults import Fault
from coppice.wire.keys import RunKeys
from coppice.wire.messages import Trained, Turn
from coppice.wire.published import Weights
from coppice.wire.sockets import Router

log = logging.getLogger("scheduler.main")

INTERRUPTED = 130
REPORTED = [*WORK, "actions", "invalid_actions", "invalid_outcomes", "judged_scores"]
REPORTED += ["invalid_judgements", "outgrown_trajectories", "refused_episodes", "crashed_episodes"]
REPORTED += ["tree_retries", "failed_loads", "dropped_branches", "retrievals", "opponent_moves"]
REPORTED += ["spoken_replies", "routing_conflicts"]
"""Counts of the summary that continue after a resume."""
CHECK_S = 2.0
"""Seconds within which the death of a background task is noticed; it ends the run."""
REMOVED_AT_ONCE = 8
"""The trees of old versions that are removed before messages get their turn."""
LEAVE_S = 30.0
"""Seconds that the end waits for the learner's last answers, then for workers to leave, and for an
environment to close."""


class Run:
    """One run: ``await main()`` to its end or a cancellation, then ``await close()``."""

    pacing: Pacing
    training_since = 0.0
    finished = False

    def __init__(
        self, process: SchedulerProcess, router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.process, self.settings, self._clock = process, process.scheduler, clock
        # the command that started this process says when it began
        command, _, at = os.environ.get("COPPICE_STARTED", "").partition(" ")
        began = float(at) if command == str(starter()) else scheduler.STARTED
        self.phases = Phases("set-up", began)
        self.phases.enter("starting processes", scheduler.STARTED)
        self.home, self.shard, s = Path(process.run), process.shard, process.scheduler
        self.folder = shards.folder(self.home, self.shard.number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.folder / "journal.sqlite", shard=self.shard)
        keys = RunKeys.create(self.folder / "keys") if router is None else None
        # a shard that is started again listens where it did before
        before = self.folder / "endpoint"
        bind = before.read_text() if self.shard.number and before.exists() else s.bind
        self.dispatcher = Dispatcher(bind, keys, s.dispatch, process.seed, router, clock)
        self.metrics = Metrics(self.folder, self.shard.count > 1 and not self.shard.number)
        self.dispatcher.declared = process.judges
        self.dispatcher.on_event, self.dispatcher.on_fault = self.metrics.event, self._faulted
        self.dispatcher.roster.on_join = self._joined
        self.dispatcher.roster.on_leave = self._left
        self.faults, self.attendance = Faults(process.name), Attendance(self.folder)
        self.reminders = Reminders()
        self.environment = registry.load(process.environment, process.options)
        self.tasks, heldout, self.notes = tasks.load(process, self.environment)
        drawn_by = {"seed": str(process.seed), "verbatim": str(self.environment.verbatim)}
        drawn_by["hops_in_turn"] = str(process.scheduler.hops_in_turn)
        self.notes += resume.begin(self.journal, process.inputs | drawn_by)
        self.journal.reject(self.tasks.rejected)
        self.resumed = self.journal.next_tree() > 0
        self.stream = Stream(self.dispatcher, self.journal, self._trained, self.shard)
        pausing, waits = self.home / PAUSED, (s.watchdog_s, s.stall_s)
        self.reporter = Reporter(self.folder, self.dispatcher, self._progress, *waits, pausing)
        self.trackers = Trackers(self.folder, s.trackers)
        self.metrics.on_record = self.trackers.log
        self.exporter = Exporter(self.folder, lambda: self.metrics.newest, self._health)
        self.outdated: list[int] = []
        self.counts = Counter(self.metrics.last(REPORTED))
        tally = self.journal.tally()
        self.counts.update({of: tally.get(of, 0) for of in ("replaced", "quarantined")})
        self.counts.update(+Counter(self.metrics.last(dynamic_sampling.COUNTS)))
        self.fruitless = Fruitless(process.reward, process.evidence and not self.tasks.evidence)
        fleet = Fleet(s.budget, process.batch, clock)
        self.weight_sync = WeightSync(self.dispatcher, fleet.residency, self.counts)
        self.runtime = Runtime(
            self.dispatcher,
            self.journal,
            Text(process.model, self.environment.marks),
            self.environment,
            s,
            self.counts,
            self._emit,
            process.most,
            fleet=fleet,
            judged=JudgeTally(s.judge, self.home),
            longest=process.longest,
            routed=process.routed,
            faults=self.faults,
            versions=self.weight_sync.versions,
        )
        self.open_trees = OpenTrees(process, self.runtime, self.stream, self.tasks, self.reporter)
        examined = registry.load(process.environment, process.options | s.evaluation.options)
        if self.environment.pictures or examined.pictures:
            self.runtime.text.check_vision()
        shared = self.weight_sync, self.metrics, self.phases, self.open_trees
        self.examination = Examination(self.runtime, examined, heldout, *shared)

    async def main(self) -> None:
        """Do the whole run, from waiting for the first worker to writing the summary."""
        resume.check(self.home, self.resumed)
        if self.tasks.rejected and not self.shard.number:
            count, first = len(self.tasks.rejected), self.tasks.rejected[0]
            alerts.say(f"quarantined {count} task rows; the first: {first.where}: {first.reason}")
        for note in self.notes:
            alerts.say(note)
        await self.dispatcher.start()
        (self.folder / "endpoint").write_text(self.dispatcher.endpoint)
        if self.settings.prometheus:
            self.exporter.start(self.settings.prometheus)
        self._reporting = asyncio.create_task(self.reporter.work())
        try:
            await self._wait_for_workers()
            await self._checked(gather([self._begin(), self._train()]))
            await self._checked(self.examination.evaluate("end"))
            self.phases.enter("stopping")
            await self.stream.settle(LEAVE_S)
            await self.dismiss()
            await self._until(lambda: not self.dispatcher.workers(), LEAVE_S)
            await self._until(self.metrics.look, LEAVE_S)
            counts, calls, spent = self.counts, self.dispatcher.counters, self.phases.seconds()
            report.write(self.folder, self.journal, counts, calls, spent)
            self.finished = True
        finally:
            self._reporting.cancel()
        await asyncio.wait([self._reporting])
        await self.reporter.write()  # the last heartbeat may have come before the last update

    async def _begin(self) -> None:
        """Evaluate "start" by version 0: no actor gets newer weights before the result is durable.
        Only the first update's trees grow meanwhile, so the learner is at most one version ahead.
        """
        if not any(name == "start" for _, name, _ in self.journal.evaluations()):
            await self.examination.evaluate("start")
        self.open_trees.begun.set()
        self.open_trees.moved.set()

    async def dismiss(self) -> None:
        """Ask every worker to leave. From now on no worker is reported missing."""
        self.attendance.needed = ()
        await self.dispatcher.roster.drain()

    async def _wait_for_workers(self) -> None:
        """Wait for all workers that growing trees needs. The learner may come later."""
        services = {"generate": self.process.actors} | dict.fromkeys(self.process.services, 1)
        outcomes = {self.environment.outcome_judge, self.examination.environment.outcome_judge}
        judges = {self.settings.judge, *outcomes} - {"", UNJUDGED}
        services |= {f"judge.{name}": 1 for name in sorted(judges)}
        self.attendance.needed = needed = {**services, "train": 1}
        expected = ", ".join(f"{count} x {name}" for name, count in needed.items())
        own = f" of {self.process.name}, one of {self.shard.count}" if self.shard.count > 1 else ""
        print(f"waiting for workers{own}: {expected}", flush=True)
        for service, count in services.items():
            await self.dispatcher.wait_for(service, count, self.settings.startup_timeout_s)

    async def _wait_for_learner(self) -> tuple[Frontier, dict[int, int]]:
        """Give the actors its version. Return its checkpoint's frontier and what came after it."""
        await self.dispatcher.wait_for("train", 1, self.settings.startup_timeout_s)
        weights, newest = resume.announced(self.home)
        self.stream.version = weights.version
        # now, as the learner may replace its checkpoints while the actors load
        checkpoint = resume.adopt(self.home, weights.version, self.journal, self.shard)
        if weights.version:
            published.inside(self.home, weights.path)
            await self.open_trees.begun.wait()
            await self.weight_sync.everywhere(weights)
        waited = f"all workers are here after {self._clock() - scheduler.STARTED:.0f} s"
        print(f"{waited}; policy version {weights.version}", flush=True)
        self.phases.enter("updates")
        return checkpoint, newest

    async def _train(self) -> None:
        checkpoint, newest = await self._wait_for_learner()
        version = self.weight_sync.weights.version
        recorded = self.metrics.resume(checkpoint, version) if self.resumed else set()
        self.stream.announced |= recorded | set(range(checkpoint.version + 1))
        await self.trackers.start()
        s = self.settings
        self.pacing = Pacing(s.questions_per_update, s.max_staleness, s.updates, version)
        if not self.pacing.finished:  # resumed for more updates, it has not ended any more
            (self.folder / report.SUMMARY).unlink(missing_ok=True)
        self.metrics.counters(self.dispatcher.workers())
        self.training_since = self._clock()
        # A crash may have come between an update and its evaluation. No newer weights come before
        # the groups are sent again.
        await self.examination.evaluate_if_due(self.pacing.version, self.pacing.finished)
        self.open_trees.begin(self.pacing, newest)
        while not self.pacing.finished:
            self.open_trees.moved.clear()
            self.open_trees.admit()
            self._check()  # at each tree's end: an environment that breaks ends the run soon
            for tree in self.outdated[:REMOVED_AT_ONCE]:
                self.journal.remove(tree)
            del self.outdated[:REMOVED_AT_ONCE]
            with contextlib.suppress(TimeoutError):
                # not wait_for, which in 3.11 may lose a cancellation
                async with asyncio.timeout(CHECK_S):
                    await self.open_trees.moved.wait()

    def _emit(self, tree: Tree, turns: list[Turn]) -> None:
        self.counts.update(dynamic_sampling.counted(turns, self.process.reward, self.process.equal))
        self.stream.emit(tree, turns)

    async def _checked(self, work: Coroutine[Any, Any, object]) -> None:
        """Do ``work``, unless a background task dies meanwhile, whose error is raised."""
        async with TaskGroup() as group:
            doing = group.start(work)
            while not doing.done():
                self._check()
                await asyncio.wait([doing], timeout=CHECK_S)

    def _check(self) -> None:
        """Show others' records, and raise the error of a background task that died."""
        self.metrics.look()
        for part in (self.dispatcher.roster, self.stream, self.journal, self.open_trees):
            if part.failure is not None:
                raise part.failure
        if self._reporting.done():
            self._reporting.result()

    def _progress(self) -> dict[str, Any]:
        return {
            "phase": self.phases.now(),
            "version": self.weight_sync.weights.version,
            "updates": self.settings.updates,
            "growing": len(self.open_trees.growing),
            "done": self.open_trees.done,
            "evaluations": self.journal.evaluated()[0],
            "marks": self.journal.changes(),
        }

    def _health(self) -> Health | None:
        """The newest report, of all schedulers if this is the first. The exporter's thread asks."""
        own = self.reporter.newest
        return joined([own, *read_all(self.home)[1:]]) if own is not None else None

    def _faulted(self, service: str, fault: Fault, caller: str) -> None:
        self.faults.failed(service, fault, caller)
        self.reporter.failed(service, fault)

    async def _trained(self, trained: Trained) -> None:
        """A version was trained: give its weights to the actors, record its metrics, let pacing
        admit more. One that is told of after a newer one has its metrics recorded and nothing else.
        """
        await self.open_trees.begun.wait()
        if trained.version < self.stream.version:
            self.metrics.record(trained.version, dict(trained.metrics))
            return
        start = self._clock()
        path = published.inside(self.home, trained.path)
        await self.weight_sync.everywhere(Weights(trained.version, path, trained.digest))
        values = dict(trained.metrics) | self.metrics.counters(self.dispatcher.workers())
        judged, residency = self.runtime.judged, self.runtime.fleet.residency
        doubts = judged.take()
        if judged.share is not None:
            # PPR's turns already have this as a column
            values.setdefault("score/judge_valid", judged.share)
            values["rollout/judged_scores"] = float(judged.scores)
        values["time/spread"] = self._clock() - start
        values["time/training"] = self._clock() - self.training_since
        if outcomes := self.open_trees.outcomes:
            values["rollout/outcome"] = sum(outcomes) / len(outcomes)
            values["rollout/outcomes"] = float(len(outcomes))
            outcomes.clear()
        counts = {**self.counts, **self.dispatcher.counters}
        values |= {f"count/{name}": float(n) for name, n in counts.items()}
        values |= residency.take()
        self.metrics.record(trained.version, values)
        # the learner tells every scheduler
        warnings = [] if self.shard.number else [*trained.warnings, *self.fruitless.note(values)]
        for warning in self.reminders.due(trained.version, [*warnings, *doubts]):
            alerts.say(f"warning, update {trained.version}: {warning}")
        self.pacing.trained(trained.version)
        if keep := self.settings.keep_versions:
            self.metrics.rotate(trained.version, keep)
            self.outdated = self.journal.finished(resume.settled(self.home, trained.version - keep))
        await self.examination.evaluate_if_due(self.pacing.version, self.pacing.finished)
        self.open_trees.moved.set()

    async def _joined(self, worker: Worker) -> None:
        log.info("%s joined: %s", worker.name, worker.hello)
        self.stream.learner_joined(worker)
        self.reporter.joined(worker)
        if "load" in worker.hello.services:
            await self.weight_sync.to(worker)
        self.attendance.joined(worker.name, worker.hello.services)

    def _left(self, worker: Worker, reason: str) -> None:
        log.info("%s left: %s", worker.name, reason)
        self.runtime.fleet.left(worker.name)
        self.reporter.left(worker, reason)
        staying = [w.hello.services for w in self.dispatcher.workers() if not w.draining]
        self.attendance.left(worker.hello.services, reason, set().union(*staying))

    async def _until(self, done: Callable[[], bool], timeout: float) -> None:
        end = self._clock() + timeout
        while not done() and self._clock() < end:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Stop growing trees and close everything. The journal keeps what was written to it."""
        await self.open_trees.stop()
        await self.stream.stop()
        for environment in (self.environment, self.examination.environment):
            try:
                async with asyncio.timeout(LEAVE_S):
                    await environment.close()
            except Exception:
                log.exception("the environment %s could not be closed", environment.name)
        await self.dispatcher.close()
        self.exporter.close()
        self.metrics.close()
        self.journal.close()
        await self.trackers.close(FINISH_S if self.finished else STOP_S)


async def run(process: SchedulerProcess) -> int:
    """Run until the end or until a signal. Returns the exit status."""
    scheduling = Run(process)
    work = asyncio.create_task(scheduling.main())
    try:
        if not await loop.or_signal(work):
            await scheduling.dismiss()
            return INTERRUPTED
        work.result()
        return 0
    finally:
        await scheduling.close()


def main() -> None:
    begin()
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SchedulerProcess)
    try:
        with sparing():
            sys.exit(loop.run(run(process)))
    except (Fault, JournalError) as error:
        log.error("the run ends: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
