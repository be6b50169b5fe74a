"""Held-out evaluation: whole trajectories by the policy in force, on tasks never trained on."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.common.concurrency import gather
from coppice.common.phases import Phases
from coppice.scheduler.dispatch.weight_sync import WeightSync
from coppice.scheduler.evaluation import best, evaluation
from coppice.scheduler.growth import answers, strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.open_trees import OpenTrees
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.telemetry import report
from coppice.scheduler.telemetry.alerts import JudgeTally
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.wire.faults import DataFault

log = logging.getLogger("scheduler.examination")

AT_ONCE = 96
"""The largest number of held-out trees that grow at the same time."""
WORK = ["environment_steps", "continuation_steps", "generated_tokens"]
"""Counts of work for curves. They continue after a resume, with work that a crash undid."""


class Examination:
    """Evaluates the policy in force on the held-out ``tasks``; does nothing without tasks.

    environment: the run's, with the options of [scheduler.evaluation]. trees: numbers and grows the
    trees of evaluations, which use a copy of ``runtime`` that trains nothing and counts nothing.
    """

    def __init__(
        self, runtime: Runtime, environment: Environment, tasks: Sequence[Task],
        weight_sync: WeightSync, metrics: Metrics, phases: Phases, trees: OpenTrees,
    ):  # fmt: skip
        self.runtime, self.environment, self.tasks = runtime, environment, tasks
        self.weight_sync, self.metrics = weight_sync, metrics
        self.phases, self.trees = phases, trees
        settings = runtime.settings
        self.strategy = strategies.evaluation(settings.strategy, settings.strategy_options)

    async def evaluate_if_due(self, version: int, finished: bool) -> None:
        """Evaluate ``version`` if an evaluation is due: also later than it was, after a stop. The
        last one waits for the end."""
        every = self.runtime.settings.evaluation.every
        due = every and version - version % every
        _, newest = self.runtime.journal.evaluated()
        if newest < due and not finished:
            await self.evaluate(f"v{version}")

    async def evaluate(self, name: str) -> None:
        """Do all held-out tasks; journal and print the result, and keep the best version."""
        if not self.tasks:
            return
        start, weights, journal = time.monotonic(), self.weight_sync.weights, self.runtime.journal
        ends = {"start": "first evaluation", "end": "last evaluation"}
        settings, room = self.runtime.settings, asyncio.Semaphore(AT_ONCE)
        e, silent = settings.evaluation, lambda tree, turns: None
        own = msgspec.structs.replace(settings, temperature=e.temperature, top_p=1.0, top_k=0)
        parts = {"counts": Counter(), "judged": JudgeTally(), "environment": self.environment}
        runtime = msgspec.structs.replace(self.runtime, emit=silent, settings=own, **parts)
        with self.phases.over(ends.get(name, "evaluations between")):
            work = (self._examine(i, task, runtime, room) for i, task in enumerate(self.tasks))
            pairs = await gather(work)
        done = [pair for pair in pairs if pair is not None]
        how = f"temperature {e.temperature}, options {e.options}"
        headline, pooled = self.environment.headline, evaluation.pooled(self.environment, done)
        measures = {name: evaluation.estimate(values) for name, values in pooled.items()}
        result = evaluation.HeldOut(weights.version, len(done), headline, measures, how)
        if headline in measures:
            whole = f"{e.questions} tasks, {how}"
            best.keep(self.metrics.run, weights, headline, measures[headline].mean, whole)
        values = {f"heldout/{key}": estimate.mean for key, estimate in measures.items()}
        values |= {f"heldout/{key}_half": estimate.half for key, estimate in measures.items()}
        for key in WORK:  # of several schedulers, the newest record has the counts of all
            newest = self.metrics.newest.get(f"count/{key}", 0.0)
            values[f"count/{key}"] = max(newest, float(self.runtime.counts[key]))
        self.metrics.record(weights.version, values)
        # last: what dies before this is evaluated again
        journal.save_evaluation(weights.version, name, msgspec.to_builtins(result))
        print(report.heldout_line(name, result, time.monotonic() - start), flush=True)

    async def _examine(
        self, position: int, task: Task, runtime: Runtime, room: asyncio.Semaphore
    ) -> tuple[Task, Tree] | None:
        """Grow one held-out trajectory. Returns None if its task cannot work."""

        async def grow(tree: Tree, context: Context) -> None:
            await self.strategy(tree, context)
            # so that what cannot be measured fails with its tree
            for name, values in evaluation.measured(self.environment, task, tree).items():
                for value in values:
                    answers.given(self.environment.name, {name: value})

        async with room:
            tree, journal = Tree(next(self.trees.ids), task.id, "heldout"), self.runtime.journal
            context = Context(runtime, task, tree, random.Random(f"heldout/{position}"))
            journal.start_tree(tree, position, self.weight_sync.weights.version)
            try:
                await self.trees.attempts(tree, context, grow)
            except DataFault as fault:
                log.error("held-out task %s is quarantined: %s", tree.task, fault)
                journal.close_tree(tree, "quarantined", str(fault))
                return None
            journal.close_tree(tree)
            return task, tree
