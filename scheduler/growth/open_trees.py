"""Draw tasks, grow their trees under pacing, and end each: closed, replaced or quarantined."""

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable

from coppice.actors.environments.base import Task
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.dynamic_sampling import differs
from coppice.scheduler.growth.failures import brief, is_of_the_run, traced
from coppice.scheduler.growth.services import ATTEMPTS, Runtime
from coppice.scheduler.growth.tasks import GeneratedTasks, Tasks
from coppice.scheduler.growth.tree import DROPPED, Tree
from coppice.scheduler.ledger.journal import TreeRow
from coppice.scheduler.ledger.pacing import Pacing
from coppice.scheduler.ledger.stream import Stream
from coppice.scheduler.telemetry.health import Reporter
from coppice.wire.faults import DataFault, Fault, InfrastructureFault

log = logging.getLogger("scheduler.open_trees")

Grow = Callable[[Tree, Context], Awaitable[None]]

ADMITTED_AT_ONCE = 32
"""The number of trees that are started before messages and other trees get their turn."""


class OpenTrees:
    """The trees of a run. Invariant: every drawn task ends closed, replaced or quarantined. Until
    ``begun`` is set, only the first update's trees grow; ``admit`` must follow ``moved``. outcomes:
    of trajectories that ended since it was cleared. failure: of a tree's task; it ends the run."""

    pacing: Pacing
    failure: BaseException | None = None

    def __init__(
        self, process: SchedulerProcess, runtime: Runtime, stream: Stream,
        tasks: Tasks | GeneratedTasks, reporter: Reporter,
    ):  # fmt: skip
        self.process, self.settings, self.shard = process, process.scheduler, process.shard
        self.runtime, self.journal, self.counts = runtime, runtime.journal, runtime.counts
        self.stream, self.tasks, self.reporter = stream, tasks, reporter
        self.strategy = strategies.load(self.settings.strategy, self.settings.strategy_options)
        self.moved, self.begun = asyncio.Event(), asyncio.Event()
        self.unfinished: deque[TreeRow] = deque()
        self.growing: dict[int, asyncio.Task[None]] = {}
        self.outcomes: list[float] = []
        self._quarantined = self._failing = 0  # of this start, and since a tree closed
        self.done = sum(n for status, n in self.journal.tally().items() if status != "growing")
        self.ids = itertools.count(self.shard.after(self.journal.next_tree() - 1), self.shard.count)
        self.next_draw = self.shard.draws(self.journal.next_position())

    def begin(self, pacing: Pacing, newest: dict[int, int]) -> None:
        """Take up what earlier starts left. newest: groups that are trained already."""
        self.pacing = pacing
        for row in self.journal.untrained_trees():
            trained = any(group in newest for group, _ in self.journal.groups(row.id))
            # Replaced trees count in no update, and trained ones in one that ``version`` counts
            # already. In a deterministic run the former wait, to be replaced in the same updates.
            if trained or (row.status == "replaced" and not self.process.deterministic):
                self._take_up(row, trained)
            else:
                self.unfinished.append(row)
        self.admit()

    async def stop(self) -> None:
        """Abandon the trees that grow. The journal keeps what was written to it."""
        for task in list(self.growing.values()):
            task.cancel()
        await asyncio.gather(*self.growing.values(), return_exceptions=True)

    def admit(self) -> None:
        """Start trees while pacing admits them and the run is not paused: first those of an earlier
        start, the oldest first, so that updates take the same trees as without a crash."""
        first = self.settings.questions_per_update
        for _ in range(ADMITTED_AT_ONCE):
            begun = self.begun.is_set() or self.pacing.admitted < first
            if self.reporter.paused or not (begun and self.pacing.may_start()):
                return
            if self.unfinished:
                if (row := self.unfinished.popleft()).status != "replaced":
                    self.pacing.start()
                self._take_up(row)
            else:
                self._plant()
        self.moved.set()

    async def attempts(self, tree: Tree, context: Context, grow: Grow) -> None:
        """Plant and grow a tree, again after an infrastructure fault. Raises the last attempt's
        InfrastructureFault, and DataFault for what is the tree's: also an exception of a plug-in.
        """
        try:
            for attempt in range(1, ATTEMPTS + 1):
                context.services.attempt = attempt
                try:
                    await context.plant()
                    await grow(tree, context)
                    context.save([])  # so that what cannot be written fails here, with the tree
                    return
                except InfrastructureFault as fault:
                    log.warning("tree %d, attempt %d: %s", tree.id, attempt, fault)
                    if attempt == ATTEMPTS:
                        raise InfrastructureFault(
                            f"tree {tree.id} failed {ATTEMPTS} times; the last time: {fault}. Mend"
                            " or replace the worker (its log says more), then resume the run"
                            f" ({self._whose(tree)})"
                        ) from fault
                    self.counts["tree_retries"] += 1
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, Fault) or is_of_the_run(error):
                raise
            # What is not written yet may be what cannot be written. The step is lost, as in a
            # crash.
            tree.changed.clear()
            raise self._own_fault(tree, error) from error
        finally:
            self.runtime.fleet.ended(tree.id)
            self.runtime.dispatcher.look_again("generate")
            self.moved.set()

    def _own_fault(self, tree: Tree, error: BaseException) -> DataFault:
        self.runtime.faults.failed("a tree", brief(error), f"{self._whose(tree)}: quarantined")
        return DataFault(traced(error))

    def _plant(self) -> None:
        draw, self.next_draw = self.next_draw, self.next_draw + 1
        position = self.shard.position(draw)
        drawn = self._drawn(position)
        tree = Tree(next(self.ids), drawn.id if isinstance(drawn, Task) else f"draw {position}")
        self.pacing.start()
        self._begin(tree, drawn, position)

    def _begin(self, tree: Tree, drawn: Task | Exception, position: int) -> None:
        digest = drawn.digest if isinstance(drawn, Task) else ""
        self.journal.start_tree(tree, position, self.pacing.version, digest)
        self._spawn(tree, drawn, position)

    def _drawn(self, position: int) -> Task | Exception:
        """Return the task of a draw, or the error of the environment that could not make it."""
        try:
            return self.tasks.at(position)
        except Exception as error:
            if is_of_the_run(error):
                raise
            return error

    def _take_up(self, row: TreeRow, counted: bool = False) -> None:
        """Continue a tree of an earlier start: resend its untrained groups, and grow what is
        missing. It grows anew with the random numbers of its beginning if the run is deterministic,
        it is damaged, or another task began it. counted: in an update that is trained already."""
        drawn = self._drawn(row.position)
        if row.status == "growing" and self.process.deterministic:
            self.journal.uproot(row.id)
        try:
            tree = self._whole(row, drawn)
        except ValueError as error:
            if counted:
                raise
            self.journal.uproot(row.id)
            if row.status != "replaced":  # which another tree stands for
                tree = Tree(row.id, drawn.id if isinstance(drawn, Task) else row.task)
                self.counts["tree_retries"] += 1
                log.warning("tree %d grows anew: %s", tree.id, error)
                self.runtime.faults.failed("a tree of an earlier start", brief(error), "regrown")
                self._begin(tree, drawn, row.position)
            return
        for group, trained in self.journal.groups(row.id):
            if trained is None:
                self.stream.resend(tree, group)
        if row.status != "growing":
            self.stream.close(tree, row.status == "replaced")
            return
        self._spawn(tree, drawn, row.position)

    def _whole(self, row: TreeRow, drawn: Task | Exception) -> Tree:
        """Return the tree of a row. Raises ValueError if it is damaged, or half grown from another
        task than its draw gives now."""
        if row.removed:
            raise ValueError(f"it was {row.reason}, and its checkpoints are gone")
        tree, now = self.journal.tree(row), isinstance(drawn, Task) and drawn.digest
        if now and row.status == "growing" and row.digest not in ("", now):
            raise ValueError(f"its draw gave task {row.digest} and gives task {now} now")
        for node in tree.nodes.values():
            self.journal.pictures(node.tokens)
        needed = {turn.node for group in tree.groups for turn in self.journal.turns(group)}
        needed |= {node.parent for node in tree.nodes.values() if node.id}
        if lost := needed - tree.nodes.keys():
            raise ValueError(f"the journal has lost its nodes {lost}")
        return tree

    def _spawn(self, tree: Tree, drawn: Task | Exception, position: int) -> None:
        if isinstance(drawn, Exception):
            self._quarantine(tree, str(self._own_fault(tree, drawn)))
            return
        rng = random.Random(f"{self.process.seed}/{tree.split}/{position}/{len(tree.nodes)}")
        task = asyncio.create_task(self._grow(tree, Context(self.runtime, drawn, tree, rng)))
        self.growing[tree.id] = task

        def ended(task: asyncio.Task[None]) -> None:
            self.growing.pop(tree.id, None)
            self.done += not task.cancelled() and task.exception() is None
            if not task.cancelled() and task.exception() is not None:
                self.failure = task.exception()
            self.moved.set()

        task.add_done_callback(ended)

    async def _grow(self, tree: Tree, context: Context) -> None:
        """Grow one tree to its end. A task that cannot work is quarantined."""
        try:
            await self.attempts(tree, context, self.strategy)
        except DataFault as fault:
            self._quarantine(tree, str(fault))
            return
        if not tree.groups:
            # an update of such trees alone would be answered to nobody: the run would wait forever
            dropped = [n.notes[DROPPED] for n in tree.nodes.values() if DROPPED in n.notes]
            why = f"an episode was dropped: {dropped[0]}" if dropped else "no judge gave an outcome"
            self._quarantine(tree, f"no trajectory could be trained, because {why}")
            return
        replaced = len(self.stream.replaced) < self.settings.dynamic_sampling_budget
        if replaced:  # another question takes the tree's place in the next update
            groups = map(self.journal.turns, tree.groups)
            across = self.strategy.gives.group == "task"
            replaced = not differs(groups, self.process.reward, self.process.equal, across)
        self._failing = 0
        self.journal.close_tree(tree, "replaced" if replaced else "closed")
        self.stream.close(tree, replaced)
        if replaced:
            self.counts["replaced"] += 1
            self.pacing.withdraw()
        tips = [tree.tip(number) for number in {node.trajectory for node in tree.nodes.values()}]
        self.outcomes += [tip.scores["outcome"] for tip in tips if "outcome" in tip.scores]

    def _quarantine(self, tree: Tree, reason: str) -> None:
        log.error("task %s is quarantined: %s", tree.task, reason)
        self.counts["quarantined"] += 1
        self._quarantined, self._failing = self._quarantined + 1, self._failing + 1
        self.journal.close_tree(tree, "quarantined", reason)
        if tree.groups:
            self.stream.close(tree)  # the groups it has emitted are trained
        else:
            self.pacing.withdraw()
        many, in_a_row = self.pacing.admitted // 2, 2 * self.pacing.questions
        if self._quarantined > 20 + many or self._failing > 20 + in_a_row:
            cause = reason.partition("\n")[0]
            raise DataFault(
                f"{self._quarantined} tasks were quarantined; the last reason: {cause}"
                f" ({self._whose(tree)})"
            )

    def _whose(self, tree: Tree) -> str:
        """What an error names besides its cause."""
        agent = self.process.options.get("run")
        return f"task {tree.task} of {f'the agent {agent}' if agent else self.process.environment}"
