"""The scheduler process: evaluate, grow trees under pacing, stream groups, spread new weights,
evaluate again, sum up.

``python -m coppice.scheduler.main PROCESS.json``. The run ends with a summary, with an error that says what
failed, or by a signal; ``coppice launch --resume`` continues it after a signal.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from coppice import scheduler
from coppice.actors.environments import registry
from coppice.common import loop, shards
from coppice.common.process import begin
from coppice.scheduler.config import UNJUDGED, SchedulerProcess
from coppice.scheduler.dispatch.dispatcher import Dispatcher, Transport, Worker
from coppice.scheduler.evaluation.examination import WORK, Examination
from coppice.scheduler.growth import tasks
from coppice.scheduler.growth.crashes import Crashes
from coppice.scheduler.growth.forest import Forest
from coppice.scheduler.growth.services import Shop
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger import resume
from coppice.scheduler.ledger.journal import Journal, JournalError
from coppice.scheduler.ledger.pacing import Pacing
from coppice.scheduler.ledger.stream import Stream
from coppice.scheduler.ledger.survivors import sparing
from coppice.scheduler.telemetry import nothing_learnt, report, terminal
from coppice.scheduler.telemetry.exporter import Exporter
from coppice.scheduler.telemetry.fleet import Fleet
from coppice.scheduler.telemetry.health import PAUSED, Health, Reporter, Standing, joined, read_all
from coppice.scheduler.telemetry.judged import Judged
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.scheduler.telemetry.phases import LEARNER, LOADING, Phases, Training, learner_seconds
from coppice.scheduler.telemetry.spread import Spread, Weights
from coppice.scheduler.telemetry.together import together
from coppice.scheduler.telemetry.tracking import FINISH_S, STOP_S, Trackers
from coppice.wire import published
from coppice.wire.faults import Fault, InfrastructureFault
from coppice.wire.keys import RunKeys
from coppice.wire.messages import Trained, Turn

log = logging.getLogger("scheduler.main")

INTERRUPTED = 130
REPORTED = (
    "judged_scores",
    "invalid_judgements",
    "outgrown_trajectories",
    "refused_episodes",
    "crashed_episodes",
)
"""Counts of the summary that continue after a resume, as those of ``WORK`` do."""
CHECK_S = 2.0
"""Seconds within which the death of a background task is noticed; it ends the run."""
LEAVE_S = 30.0
"""The longest that the end of a run waits for the learner's last answers, and then for the workers
to leave, in seconds."""


def command_began() -> float | None:
    """When the command that started this process began (monotonic seconds), or None if the command
    did not say."""
    process, _, at = os.environ.get("COPPICE_STARTED", "").partition(" ")
    return float(at) if process == str(os.getppid()) else None


class Run:
    """One run of the scheduler: ``await main()`` to its end or until it is cancelled, then ``await
    close()`` in any case."""

    pacing: Pacing
    training: Training
    training_since = 0.0
    finished = False

    def __init__(
        self,
        process: SchedulerProcess,
        router: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.process, self.settings, self._clock = process, process.scheduler, clock
        began = command_began()
        self.phases = Phases("set-up", scheduler.STARTED if began is None else began)
        self.phases.enter("starting processes", scheduler.STARTED)
        self.home, self.shard = Path(process.run), process.shard
        self.folder = shards.folder(self.home, self.shard.number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.folder / "journal.sqlite", shard=self.shard)
        keys = RunKeys.create(self.folder / "keys") if router is None else None
        self.dispatcher = Dispatcher(
            self._address(), keys, self.settings.dispatch, process.seed, router=router, clock=clock
        )
        self.metrics = Metrics(self.folder, process.shard.count > 1 and not process.shard.number)
        self.dispatcher.on_event = self.metrics.event
        self.dispatcher.on_join = self._joined
        self.dispatcher.on_leave = self._left
        self.dispatcher.on_fault = self._faulted
        self.faults = terminal.Faults(process.name)
        self.attendance = terminal.Attendance(self.folder)
        self.reminders = terminal.Reminders()
        self.environment = registry.load(process.environment, process.options)
        self.tasks, heldout, self.notes = tasks.load(process, self.environment)
        self.journal.reject(self.tasks.rejected)
        self.stream = Stream(self.dispatcher, self.journal, self._trained, self.shard)
        s, paused = self.settings, self.home / PAUSED
        self.reporter = Reporter(
            self.folder, self.dispatcher, self._standing, s.watchdog_s, s.stall_s, paused
        )
        self.trackers = Trackers(self.folder, self.settings.trackers)
        self.exporter = Exporter(self.folder, lambda: self.metrics.newest, self._health)
        self.counts: Counter[str] = Counter(self.metrics.last((*WORK, *REPORTED)))
        self.counts["replaced"] = len(self.journal.trees("status='replaced'"))
        self.counts.update(+Counter(self.metrics.last(nothing_learnt.COUNTS)))
        unsupported = process.evidence and not self.tasks.evidence
        self.fruitless = nothing_learnt.Fruitless(process.reward, unsupported)
        self.totals: Counter[str] = Counter()
        self.resumed = self.journal.next_tree() > 0
        self.shop = Shop(
            self.dispatcher,
            self.journal,
            Text(process.model, self.environment.marks),
            self.environment,
            self.settings,
            self.counts,
            self._emit,
            process.most,
            fleet=Fleet(self.settings.budget, process.batch, clock),
            judged=Judged(self.settings.judge, self.folder),
            crashes=Crashes(self.folder),
            longest=process.longest,
            faults=self.faults,
            proven=lambda: self.spread.proven,
            newest=lambda: self.spread.weights.version,
        )
        self.spread = Spread(self.dispatcher, self.shop.fleet.residency, self.counts)
        self.forest = Forest(
            process, self.shop, self.stream, self.tasks, lambda: self.reporter.paused
        )
        examined = registry.load(
            process.environment, process.options | self.settings.evaluation.options
        )
        if self.environment.pictures or examined.pictures:
            self.shop.text.check_sight()
        self.examination = Examination(
            self.shop, examined, heldout, self.spread, self.metrics, self.phases, self.forest
        )

    def _address(self) -> str:
        """Where this scheduler listens. A shard that is started again beside a living learner
        listens where its workers look for it."""
        before = self.folder / "endpoint"
        return before.read_text() if self.shard.number and before.exists() else self.settings.bind

    # ------------------------------------------------------------------------------------------ the
    # run

    async def main(self) -> None:
        """Do the whole run, from waiting for the first worker to writing the summary."""
        resume.check(self.home, self.resumed)
        if self.tasks.rejected and not self.shard.number:
            first = self.tasks.rejected[0]
            terminal.say(
                f"quarantined {len(self.tasks.rejected)} task rows; the first: {first.where}: {first.reason}"
            )
        for note in self.notes:
            terminal.say(note)
        await self.dispatcher.start()
        (self.folder / "endpoint").write_text(self.dispatcher.endpoint)
        if self.settings.prometheus:
            self.exporter.start(self.settings.prometheus)
        self._reporting = asyncio.create_task(self.reporter.work())
        try:
            await self._run()
        finally:
            self._reporting.cancel()
        await asyncio.wait([self._reporting])
        await self.reporter.write()  # the last heartbeat may have come before the last update

    async def _run(self) -> None:
        await self._wait_for_workers()
        trivial = await self.examination.baselines(self.tasks)
        if trivial:
            shown = ", ".join(f"{k} {v:.3f}" for k, v in trivial.items())
            print(f"held-out {self.environment.headline} without a model: {shown}", flush=True)
        await together([self._begin(), self._train()])
        await self.examination.evaluate("end")
        self.phases.enter("stopping")
        # answers of the last update that had to be asked for again
        await self.stream.settle(LEAVE_S)
        await self.dismiss()
        await self._until(lambda: not self.dispatcher.workers(), LEAVE_S)
        await self._until(self.metrics.look, LEAVE_S)
        spent = self.phases.seconds()
        report.write(
            self.folder,
            self.journal,
            trivial,
            self.counts,
            self.dispatcher.counters,
            spent,
            self.training,
        )
        self.finished = True

    async def _begin(self) -> None:
        """Evaluate "start", which is of version 0 alone: no actor gets newer weights before the
        result is durable.

        Only the trees of the first update grow meanwhile, so the learner is never more than one
        version ahead of the actors.
        """
        if not any(name == "start" for _, name, _ in self.journal.evaluations()):
            await self.examination.evaluate("start")
        self.forest.begun.set()
        self.forest.moved.set()

    async def dismiss(self) -> None:
        """Ask every worker to leave. From now on no worker is reported missing."""
        self.attendance.needed = ()
        await self.dispatcher.drain()

    async def _wait_for_workers(self) -> None:
        """Wait for all workers that growing trees needs. The learner may come later."""
        services = {"generate": self.process.actors} | dict.fromkeys(self.process.services, 1)
        services |= {
            f"judge.{name}": 1
            for name in (self.settings.judge, self.environment.outcome_judge)
            if name not in ("", UNJUDGED)
        }
        expected = ", ".join(
            f"{count} x {name}" for name, count in {**services, "train": 1}.items()
        )
        own = f" of {self.process.name}, one of {self.shard.count}" if self.shard.count > 1 else ""
        print(f"waiting for workers{own}: {expected}", flush=True)
        self.attendance.needed = [*services, "train"]
        for service, count in services.items():
            await self._wait_for(service, count)

    async def _wait_for(self, service: str, count: int = 1) -> None:
        try:
            await self.dispatcher.wait_for(service, count, self.settings.startup_timeout_s)
        except TimeoutError as missing:
            raise InfrastructureFault(str(missing)) from None

    async def _wait_for_learner(self) -> dict[int, int]:
        """Wait for the learner, and give the actors its version of the weights. Return what it has
        trained since its last checkpoint."""
        await self._wait_for("train")
        weights, newest = resume.announced(self.home)
        self.stream.version = weights.version
        if weights.version:
            published.inside(self.home, weights.path)
            await self.forest.begun.wait()
            await self.spread.everywhere(weights)
        waited = self._clock() - scheduler.STARTED
        print(
            f"all workers are here after {waited:.0f} s; policy version {weights.version}",
            flush=True,
        )
        self.phases.enter("updates")
        return newest

    async def _train(self) -> None:
        newest = await self._wait_for_learner()
        version = self.spread.weights.version
        checkpoint = resume.adopt(self.home, version, self.journal, self.shard)
        recorded = self.metrics.resume(checkpoint, version) if self.resumed else set()
        self.trackers.start()
        self.stream.told |= recorded | set(range(checkpoint.version + 1))
        s = self.settings
        self.pacing = Pacing(s.questions_per_update, s.max_staleness, s.updates, version)
        if not self.pacing.finished:  # resumed for more updates, it has not ended any more
            (self.folder / report.SUMMARY).unlink(missing_ok=True)
        self.metrics.counters(self.dispatcher.workers())
        first, idle, self.training_since = (
            self.pacing.version,
            self.forest.phases.spent("no trees"),
            self._clock(),
        )
        self.forest.begin(self.pacing, newest)
        # A crash may have come between an update and its evaluation.
        await self.examination.evaluate_if_due(self.pacing.version, self.pacing.finished)
        while not self.pacing.finished:
            self.forest.moved.clear()
            self.forest.admit()
            self._check()
            with contextlib.suppress(TimeoutError):
                # not wait_for, which in 3.11 may lose a cancellation
                async with asyncio.timeout(CHECK_S):
                    await self.forest.moved.wait()
        seconds = self._clock() - self.training_since
        activities, busy = learner_seconds(self.totals, seconds), self.metrics.busy()
        idle, loading = self.forest.phases.spent("no trees") - idle, self.totals[LOADING]
        last, resumed = self.pacing.version, self.resumed
        self.training = Training(first, last, resumed, seconds, activities, busy, idle, loading)

    def _emit(self, tree: Tree, turns: list[Turn]) -> None:
        self.counts.update(nothing_learnt.counted(turns, self.process.reward, self.process.equal))
        self.stream.emit(tree, turns)

    def _check(self) -> None:
        """Show what the other schedulers have recorded, and raise the error of a background task
        that died; the error ends the run."""
        self.metrics.look()
        for failure in (
            self.dispatcher.failure(),
            self.stream.failure(),
            self.journal.failure,
            self.forest.failure,
        ):
            if failure is not None:
                raise failure
        if self._reporting.done():
            self._reporting.result()

    def _standing(self) -> Standing:
        return Standing(
            self.phases.now(), self.spread.weights.version, self.settings.updates, len(self.forest.growing), self.forest.done,
            len(self.journal.evaluations()), self.journal.changes(),
        )  # fmt: skip

    def _health(self) -> Health | None:
        """The newest report of this scheduler, or of all if this is the first of several. The
        exporter's thread asks."""
        own = self.reporter.newest
        return joined([own, *read_all(self.home)[1:]]) if own is not None else None

    def _faulted(self, service: str, fault: Fault, caller: str) -> None:
        self.faults.failed(service, fault, caller)
        self.reporter.failed(service, fault)

    # ------------------------------------------------------------------------------------------
    # weights

    async def _trained(self, trained: Trained) -> None:
        """A version was trained: give its weights to the actors, record its metrics, then let
        pacing admit more trees.

        A version that is told of after a newer one, because the learner's connection broke, has its
        metrics recorded and nothing else.
        """
        await self.forest.begun.wait()
        if trained.version < self.stream.version:
            self.metrics.record(trained.version, dict(trained.metrics))
            return
        start = self._clock()
        path = published.inside(self.home, trained.path)
        await self.spread.everywhere(Weights(trained.version, path, trained.digest))
        values = dict(trained.metrics) | self.metrics.counters(self.dispatcher.workers())
        doubts = [self.shop.judged.take(), self.shop.fleet.residency.doubt()]
        if self.shop.judged.share is not None:
            # PPR's turns already have this as a column
            values.setdefault("score/judge_valid", self.shop.judged.share)
            values["rollout/judged_scores"] = float(self.shop.judged.scores)
        values["time/spread"] = self._clock() - start
        values["time/training"] = self._clock() - self.training_since
        if self.forest.outcomes:
            values["rollout/outcome"] = sum(self.forest.outcomes) / len(self.forest.outcomes)
            values["rollout/outcomes"] = float(len(self.forest.outcomes))
            self.forest.outcomes.clear()
        values |= {
            f"count/{name}": float(n)
            for name, n in {**self.counts, **self.dispatcher.counters}.items()
        }
        values |= self.shop.fleet.residency.take().values()
        self.totals.update({name: values.get(name, 0.0) for name in (*LEARNER, LOADING)})
        self.metrics.record(trained.version, values)
        self.trackers.check()
        learnt = [*trained.warnings, *self.fruitless.note(values)]
        told = [] if self.shard.number else learnt  # the learner tells every scheduler
        for warning in self.reminders.due(trained.version, [*told, *filter(None, doubts)]):
            terminal.say(f"warning, update {trained.version}: {warning}")
        self.pacing.trained(trained.version)
        await self.examination.evaluate_if_due(self.pacing.version, self.pacing.finished)
        self.forest.moved.set()

    async def _joined(self, worker: Worker) -> None:
        log.info(
            "%s joined: %s, capacity %d", worker.name, worker.hello.services, worker.hello.capacity
        )
        self.stream.learner_joined(worker)
        self.reporter.joined(worker)
        if "load" in worker.hello.services:
            await self.spread.to(worker)
        self.attendance.joined(worker.name, worker.hello.services)

    def _left(self, worker: Worker, reason: str) -> None:
        log.info("%s left: %s", worker.name, reason)
        self.shop.fleet.left(worker.name)
        self.reporter.left(worker, reason)
        staying = [other for other in self.dispatcher.workers() if not other.draining]
        self.attendance.left(
            worker.hello.services,
            reason,
            {service for other in staying for service in other.hello.services},
        )

    async def _until(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait at most ``timeout`` seconds until ``done``."""
        end = self._clock() + timeout
        while not done() and self._clock() < end:
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------------------------------ end

    async def close(self) -> None:
        """Stop growing trees and close everything. The journal keeps what was written to it."""
        await self.forest.stop()
        await self.stream.stop()
        for environment in (self.environment, self.examination.environment):
            await environment.close()
        await self.dispatcher.close()
        self.exporter.close()
        self.metrics.close()
        self.journal.close()
        self.trackers.close(FINISH_S if self.finished else STOP_S)


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
    """Run the scheduler process, as the launcher starts it."""
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
