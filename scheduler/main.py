"""The scheduler process: evaluate, grow trees under pacing, stream groups, spread new weights, evaluate again, sum up.

``python -m scheduler.main PROCESS.json``. Invariant: every drawn task ends closed or quarantined. The run ends with a summary, with an
error that says what failed, or by a signal; ``tools/launch --resume`` continues it after a signal.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

import scheduler
from actors.environments import registry
from actors.environments.base import Task
from scheduler import report, strategies, terminal
from scheduler.config import UNJUDGED, SchedulerConfig, SchedulerProcess
from scheduler.context import ATTEMPTS, Context, Shop
from scheduler.dispatch import Dispatcher, Transport, Worker
from scheduler.dynamic_sampling import differs
from scheduler.examination import WORK, Examination
from scheduler.exporter import Exporter
from scheduler.fleet import Fleet
from scheduler.health import PAUSED, Reporter, Standing
from scheduler.journal import Journal, JournalError, TreeRow
from scheduler.judged import Judged
from scheduler.metrics import Metrics
from scheduler.pacing import Pacing
from scheduler.phases import SUMMED, Phases, Training
from scheduler.spread import Spread, Weights
from scheduler.stream import Stream
from scheduler.survivors import Survivors
from scheduler.tasks import GeneratedTasks, Tasks, held_out
from scheduler.text import Text
from scheduler.together import together
from scheduler.tracking import FINISH_S, STOP_S, Trackers
from scheduler.tree import Tree
from wire import loop, published, shards
from wire.faults import DataFault, Fault, InfrastructureFault
from wire.frontier import Frontier, read
from wire.keys import RunKeys
from wire.messages import Trained
from wire.process import begin

log = logging.getLogger("scheduler.main")

INTERRUPTED = 130
REPORTED = ("judged_scores", "invalid_judgements", "outgrown_trajectories")
"""Counts of the summary that continue after a resume, as those of ``WORK`` do."""
CHECK_S = 2.0
"""Seconds within which the death of a background task is noticed; it ends the run."""
ADMITTED_AT_ONCE = 32
"""The number of trees that are started before messages and other trees get their turn."""
LEAVE_S = 30.0
"""The longest that the end of a run waits for the learner's last answers, and then for the workers to leave, in seconds."""


def frontier(run: Path, version: int) -> Frontier:
    """The frontier of the checkpoint of the learner's ``version``, or of the one before if the learner has outlived the scheduler and has not
    written one since. Raises DataFault if it cannot be read."""
    try:
        return read(run, version)
    except (OSError, ValueError) as error:
        raise DataFault(
            f"the frontier of version {version} in {run}/checkpoints cannot be read ({error}): resume again, and the learner sets the"
            " checkpoint aside if it is damaged"
        ) from None


def command_began() -> float | None:
    """When the command that started this process began (monotonic seconds), or None if the command did not say."""
    process, _, at = os.environ.get("COPPICE_STARTED", "").partition(" ")
    return float(at) if process == str(os.getppid()) else None


class Run:
    """One run of the scheduler: ``await main()`` to its end or until it is cancelled, then ``await close()`` in any case."""

    training: Training

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
        self.growth = Phases("no trees")
        self.home, self.shard = Path(process.run), process.shard
        self.folder = shards.folder(self.home, self.shard.number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.folder / "journal.sqlite", shard=self.shard)
        keys = RunKeys.create(self.folder / "keys") if router is None else None
        self.dispatcher = Dispatcher(
            self._address(), keys, self.settings.dispatch, process.seed, router=router, clock=clock
        )
        self.metrics = Metrics(self.folder)
        self.dispatcher.on_event = self.metrics.event
        self.dispatcher.on_join = self._joined
        self.dispatcher.on_leave = self._left
        self.dispatcher.on_fault = self._faulted
        self.faults = terminal.Faults(process.name)
        self.attendance = terminal.Attendance(self.folder)
        self.reminders = terminal.Reminders()
        self.environment = registry.load(process.environment, process.options)
        count = self.settings.evaluation.questions
        if registry.makes_tasks(self.environment):
            self.tasks = GeneratedTasks(self.environment.task, process.seed)  # pyright: ignore[reportAttributeAccessIssue]
            heldout, self.notes = self.tasks.held_out(count), []
        else:
            self.tasks = Tasks(process.train, process.seed, self.environment.verbatim)
            heldout, self.notes = held_out(process.heldout, count, self.environment.verbatim)
        self.journal.reject(self.tasks.rejected)
        self.stream = Stream(self.dispatcher, self.journal, self._trained, self.shard)
        self.pacing: Pacing
        self.unfinished: deque[TreeRow] = deque()
        self.reporter = Reporter(
            self.folder,
            self.dispatcher,
            self._standing,
            self.settings.watchdog_s,
            self.settings.stall_s,
            self.home / PAUSED,
        )
        self.trackers = Trackers(self.folder, self.settings.trackers)
        self.exporter = Exporter(self.folder, lambda: self.metrics.newest, lambda: self.reporter.newest)
        self.done = sum(count for status, count in self.journal.tally().items() if status != "growing")
        self.growing: dict[int, asyncio.Task[None]] = {}
        self.moved = asyncio.Event()
        self.begun = asyncio.Event()
        self.counts: Counter[str] = Counter(self.metrics.last((*WORK, *REPORTED)))
        self.counts["replaced"] = len(self.journal.trees("status='replaced'"))
        self.totals: Counter[str] = Counter()
        self.outcomes: list[float] = []
        self.next_tree = self.shard.after(self.journal.next_tree() - 1)
        self.next_draw = self.shard.draws(self.journal.next_position())
        self.resumed = self.journal.next_tree() > 0
        self.shop = Shop(
            self.dispatcher,
            self.journal,
            Text(process.model, self.environment.marks),
            self.environment,
            self.settings,
            self.counts,
            self.stream.emit,
            process.most,
            fleet=Fleet(self.settings.budget, self.settings.placement.batch, clock),
            judged=Judged(self.settings.judge, self.folder),
            longest=process.longest,
            proven=lambda: self.spread.proven,
            newest=lambda: self.spread.weights.version,
        )
        self.spread = Spread(self.dispatcher, self.shop.fleet.residency, self.counts)
        self.grow = strategies.load(self.settings.strategy, self.settings.strategy_options)
        examined = registry.load(process.environment, process.options | self.settings.evaluation.options)
        if self.environment.pictures or examined.pictures:
            self.shop.text.check_sight()
        self.examination = Examination(
            self.shop, examined, heldout, self.spread, self.metrics, self.phases, self._attempts, self._number
        )

    def _address(self) -> str:
        """Where this scheduler listens. A shard that is started again beside a living learner listens where its workers look for it."""
        before = self.folder / "endpoint"
        return before.read_text() if self.shard.number and before.exists() else self.settings.bind

    # ------------------------------------------------------------------------------------------ the run

    async def main(self) -> None:
        """Do the whole run, from waiting for the first worker to writing the summary."""
        checkpoints = sorted((self.home / "checkpoints").glob("v??????"))
        if checkpoints and not self.resumed:
            raise DataFault(
                f"{self.home} holds weights of version {int(checkpoints[-1].name[1:])} and an empty journal: they belong to another run;"
                " choose another folder, or remove this one while nothing runs in it"
            )
        if self.tasks.rejected and not self.shard.number:
            first = self.tasks.rejected[0]
            terminal.say(f"quarantined {len(self.tasks.rejected)} task rows; the first: {first.where}: {first.reason}")
        for note in self.notes:
            terminal.say(note)
        await self.dispatcher.start()
        (self.folder / "endpoint").write_text(self.dispatcher.endpoint)
        if self.settings.prometheus:
            self.exporter.start(self.settings.prometheus)
        reporting = asyncio.create_task(self.reporter.work())

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._failure = task.exception()

        reporting.add_done_callback(ended)
        try:
            await self._run()
        finally:
            reporting.cancel()

    async def _run(self) -> None:
        await self._wait_for_workers()
        trivial = await self.examination.baselines(self.tasks)
        if trivial:
            shown = ", ".join(f"{k} {v:.3f}" for k, v in trivial.items())
            print(f"held-out {self.environment.headline} without a model: {shown}", flush=True)
        await together([self._begin(), self._train()])
        await self.examination.evaluate("end")
        self.phases.enter("stopping")
        await self.stream.settle(LEAVE_S)  # answers of the last update that had to be asked for again
        await self.dismiss()
        await self._workers_left(LEAVE_S)
        spent = self.phases.seconds()
        report.write(self.folder, self.journal, trivial, self.counts, self.dispatcher.counters, spent, self.training)
        self.finished = True

    async def _begin(self) -> None:
        """Evaluate "start", which is of version 0 alone: no actor gets newer weights before the result is durable.

        Only the trees of the first update grow meanwhile, so the learner is never more than one version ahead of the actors.
        """
        if not any(name == "start" for _, name, _ in self.journal.evaluations()):
            await self.examination.evaluate("start")
        self.begun.set()
        self.moved.set()

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
        expected = ", ".join(f"{count} x {name}" for name, count in {**services, "train": 1}.items())
        print(f"waiting for workers: {expected}", flush=True)
        self.attendance.needed = [*services, "train"]
        for service, count in services.items():
            await self._wait_for(service, count)

    async def _wait_for(self, service: str, count: int = 1) -> None:
        try:
            await self.dispatcher.wait_for(service, count, self.settings.startup_timeout_s)
        except TimeoutError as missing:
            raise InfrastructureFault(str(missing)) from None

    async def _wait_for_learner(self) -> dict[int, int]:
        """Wait for the learner, and give the actors its version of the weights. Return what it has trained since its last checkpoint."""
        await self._wait_for("train")
        # The learner wrote its newest weights before it registered. A resumed run continues from them.
        path = self.home / "learner.json"
        announced = path.read_bytes() if path.exists() else b"{}"
        weights = msgspec.json.decode(announced, type=Weights)
        self.stream.version = weights.version
        if weights.version:
            published.inside(self.home, weights.path)
            await self.begun.wait()
            await self.spread.everywhere(weights)
        waited = self._clock() - scheduler.STARTED
        print(f"all workers are here after {waited:.0f} s; policy version {weights.version}", flush=True)
        self.phases.enter("updates")
        return msgspec.json.decode(announced, type=Frontier).groups()

    async def _train(self) -> None:
        newest = await self._wait_for_learner()
        version = self.spread.weights.version
        checkpoint = frontier(self.home, version)
        durable = self.shard.own(checkpoint.groups())
        if lost := self.journal.lacks(durable):
            raise DataFault(
                f"the journal lacks {len(lost)} groups (first group {lost[0]}) that the checkpoint of version {checkpoint.version} has trained, so it is"
                f" an older one: restore its newest copy; or move the newest folders of {self.home}/checkpoints away, and lose what they trained"
            )
        # What no checkpoint holds is sent again. A learner that has outlived this scheduler answers it at once.
        self.journal.forget_training_after(checkpoint.version)
        self.journal.adopt_frontier(durable)
        recorded = self.metrics.resume(checkpoint, version) if self.resumed else set()
        self.trackers.start()
        self.stream.told |= recorded | set(range(checkpoint.version + 1))
        s = self.settings
        self.pacing = Pacing(s.questions_per_update, s.max_staleness, s.updates, version)
        self.metrics.counters(self.dispatcher.workers())
        first, idle, self.training_since = self.pacing.version, self.growth.spent("no trees"), self._clock()
        for row in self.journal.untrained_trees():
            if row.status == "replaced" or any(group in newest for group, _ in self.journal.groups(row.id)):
                self._take_up(row)  # it counts in no update, or in one that ``version`` counts already
            else:
                self.unfinished.append(row)
        self._admit()
        # A crash may have come between an update and its evaluation.
        await self.examination.evaluate_if_due(self.pacing.version, self.pacing.finished)
        while not self.pacing.finished:
            self.moved.clear()
            self._admit()
            self._check()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):  # not wait_for, which in 3.11 may lose a cancellation
                    await self.moved.wait()

        self.training = Training.of(
            (first, self.pacing.version),
            self.resumed,
            self._clock() - self.training_since,
            self.totals,
            self.metrics.busy(),
            self.growth.spent("no trees") - idle,
        )

    def _check(self) -> None:
        """Raise the error of a background task that died; the error ends the run."""
        for failure in (self.dispatcher.failure(), self.stream.failure(), self.journal.failure, self._failure):
            if failure is not None:
                raise failure

    _failure: BaseException | None = None
    training_since = 0.0
    finished = False

    # ------------------------------------------------------------------------------------------ trees

    def _standing(self) -> Standing:
        return Standing(
            self.phases.now(), self.spread.weights.version, self.settings.updates, len(self.growing), self.done,
            len(self.journal.evaluations()), self.journal.changes(),
        )  # fmt: skip

    def _faulted(self, service: str, fault: Fault, caller: str) -> None:
        self.faults.failed(service, fault, caller)
        self.reporter.failed(service, fault)

    def _number(self) -> int:
        """Take the next tree's number."""
        number, self.next_tree = self.next_tree, self.shard.after(self.next_tree)
        return number

    def _admit(self) -> None:
        """Start trees while pacing admits them and the run is not paused: first those that an earlier start left, the oldest first, then new ones.

        After a crash an update therefore takes the trees that it would have taken, although later ones may be finished already.
        """
        first = self.settings.questions_per_update
        for _ in range(ADMITTED_AT_ONCE):
            begun = self.begun.is_set() or self.pacing.admitted < first
            if self.reporter.paused or not (begun and self.pacing.may_start()):
                return
            if self.unfinished:
                self.pacing.start()
                self._take_up(self.unfinished.popleft())
            else:
                self._plant()
        self.moved.set()

    def _plant(self) -> None:
        """Draw the next task and start to grow its tree."""
        draw, self.next_draw = self.next_draw, self.next_draw + 1
        position = self.shard.position(draw)
        task = self.tasks.at(position)
        tree = Tree(self._number(), task.id)
        context = self._context(task, tree, self.settings, position)
        self.pacing.start()
        self.journal.start_tree(tree, position, self.pacing.version)
        self._spawn(tree, context)

    def _take_up(self, row: TreeRow) -> None:
        """Continue a tree that was journaled before this start: resend its untrained groups, and grow what is missing.

        A deterministic run grows an unfinished tree anew, because its random numbers depend on all that was drawn before.
        """
        if row.status == "growing" and self.process.deterministic:
            self.journal.uproot(row.id)
        tree = self.journal.tree(row)
        for group, trained in self.journal.groups(row.id):
            if trained is None:
                self.stream.resend(tree, group)
        if row.status != "growing":
            self.stream.close(tree, row.status == "replaced")
            return
        context = self._context(self.tasks.at(row.position), tree, self.settings, row.position)
        self._spawn(tree, context)

    def _context(self, task: Task, tree: Tree, settings: SchedulerConfig, position: int) -> Context:
        rng = random.Random(f"{self.process.seed}/{tree.split}/{position}/{len(tree.nodes)}")
        return Context(self.shop, settings, task, tree, rng)

    def _spawn(self, tree: Tree, context: Context) -> None:
        task = asyncio.create_task(self._grow(tree, context))
        self.growing[tree.id] = task

        def ended(task: asyncio.Task[None]) -> None:
            self.growing.pop(tree.id, None)
            self.done += not task.cancelled() and task.exception() is None
            if not task.cancelled() and task.exception() is not None:
                self._failure = task.exception()
            self.moved.set()

        task.add_done_callback(ended)

    async def _grow(self, tree: Tree, context: Context) -> None:
        """Grow one tree to its end. A task that cannot work is quarantined."""
        started = self.pacing.version
        try:
            await self._attempts(tree, context, self.grow)
        except DataFault as fault:
            self._quarantine(tree, str(fault))
            return
        if not tree.groups:
            # An update of such trees alone would be answered to nobody, and the run would wait for ever.
            self._quarantine(tree, "no trajectory could be trained, because no judge gave a valid outcome")
            return
        replaced = self._replaces(tree)
        self.journal.close_tree(tree, "replaced" if replaced else "closed")
        self.stream.close(tree, replaced)
        if replaced:
            self.counts["replaced"] += 1
            self.pacing.withdraw()
        else:
            self.pacing.close(started)
        tips = {node.trajectory for node in tree.nodes.values()}
        self.outcomes += [tree.tip(t).scores["outcome"] for t in tips if "outcome" in tree.tip(t).scores]

    def _replaces(self, tree: Tree) -> bool:
        """Whether another question takes the tree's place: no group has a spread, and the update that comes next may replace one more."""
        if not tree.groups or len(self.stream.replaced) >= self.settings.dynamic_sampling_budget:
            return False
        return not differs(map(self.journal.turns, tree.groups), self.process.reward, self.process.equal)

    async def _attempts(self, tree: Tree, context: Context, grow: strategies.Strategy) -> None:
        """Plant and grow a tree, again after an infrastructure fault. Raises DataFault, or the InfrastructureFault of the last attempt."""
        try:
            with self.growth.over("trees"):
                await self._attempt(tree, context, grow)
        finally:
            self.shop.fleet.ended(tree.id)
            self.dispatcher.look_again("generate")
            self.moved.set()

    async def _attempt(self, tree: Tree, context: Context, grow: strategies.Strategy) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            context.attempt = attempt
            try:
                await context.plant()
                await grow(tree, context)
                return
            except InfrastructureFault as fault:
                log.warning("tree %d, attempt %d: %s", tree.id, attempt, fault)
                if attempt == ATTEMPTS:
                    raise InfrastructureFault(
                        f"tree {tree.id} failed {ATTEMPTS} times; the last time: {fault}. Mend or replace the worker (its log says"
                        " more), then resume the run"
                    ) from fault
                self.counts["tree_retries"] += 1

    def _quarantine(self, tree: Tree, reason: str) -> None:
        log.error("task %s is quarantined: %s", tree.task, reason)
        self.counts["quarantined"] += 1
        self.journal.close_tree(tree, "quarantined", reason)
        if tree.groups:
            self.stream.close(tree)  # the groups it has emitted are trained
        else:
            self.pacing.withdraw()
        if self.counts["quarantined"] > 20 + self.pacing.admitted // 2:
            raise DataFault(f"{self.counts['quarantined']} tasks were quarantined; the last reason: {reason}")

    # ------------------------------------------------------------------------------------------ weights

    async def _trained(self, trained: Trained) -> None:
        """A version was trained: give its weights to the actors, record its metrics, then let pacing admit more trees.

        A version that is told of after a newer one, because the learner's connection broke, has its metrics recorded and nothing else.
        """
        await self.begun.wait()
        if trained.version < self.stream.version:
            self.metrics.record(trained.version, dict(trained.metrics))
            return
        start = self._clock()
        path = published.inside(self.home, trained.path)
        await self.spread.everywhere(Weights(trained.version, path, trained.digest))
        values = dict(trained.metrics) | self.metrics.counters(self.dispatcher.workers())
        doubts = [self.shop.judged.take(), self.shop.fleet.residency.doubt()]
        if self.shop.judged.share is not None:
            values.setdefault("score/judge_valid", self.shop.judged.share)  # PPR's turns already have this as a column
            values["rollout/judged_scores"] = float(self.shop.judged.scores)
        values["time/spread"] = self._clock() - start
        values["time/training"] = self._clock() - self.training_since
        if self.outcomes:
            values["rollout/outcome"] = sum(self.outcomes) / len(self.outcomes)
            values["rollout/outcomes"] = float(len(self.outcomes))
            self.outcomes.clear()
        values |= {f"count/{name}": float(n) for name, n in {**self.counts, **self.dispatcher.counters}.items()}
        values["count/over_stale"] = float(self.pacing.over_stale)
        values |= self.shop.fleet.residency.take().values()
        self.totals.update({name: values.get(name, 0.0) for name in SUMMED})
        self.metrics.record(trained.version, values)
        self.trackers.check()
        told = [] if self.shard.number else trained.warnings  # the learner tells every scheduler
        for warning in self.reminders.due(trained.version, [*told, *filter(None, doubts)]):
            terminal.say(f"warning, update {trained.version}: {warning}")
        self.pacing.trained(trained.version)
        await self.examination.evaluate_if_due(self.pacing.version, self.pacing.finished)
        self.moved.set()

    async def _joined(self, worker: Worker) -> None:
        log.info("%s joined: %s, capacity %d", worker.name, worker.hello.services, worker.hello.capacity)
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
            worker.hello.services, reason, {service for other in staying for service in other.hello.services}
        )

    async def _workers_left(self, timeout: float) -> None:
        end = self._clock() + timeout
        while self.dispatcher.workers() and self._clock() < end:
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------------------------------ end

    async def close(self) -> None:
        """Stop growing trees and close everything. The journal keeps what was written to it."""
        for task in list(self.growing.values()):
            task.cancel()
        await asyncio.gather(*self.growing.values(), return_exceptions=True)
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
    gc.callbacks.append(Survivors())
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SchedulerProcess)
    try:
        sys.exit(loop.run(run(process)))
    except (Fault, JournalError) as error:
        log.error("the run ends: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
