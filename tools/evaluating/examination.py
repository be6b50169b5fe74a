"""The harness of all evaluations: ``run`` is what every command does, and an ``Evaluation`` lets
policies grow one tree per task.

Invariant: every task is a tree of its policy's journal and counts once, however often the
evaluation was interrupted.
"""

import argparse
import asyncio
import random
import shlex
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.common import jsonl, loop
from coppice.common.concurrency import gather
from coppice.common.options import gave_up
from coppice.judges.serve import PlugIn
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.evaluation.evaluation import Estimate, estimate
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.failures import is_of_the_run, traced
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.folder import append, claim, cut_torn_tail, own_folder
from coppice.tools.evaluating.in_process import Handler, InProcess, NotStarted, ResumedCalls
from coppice.tools.evaluating.players import MeasuredPolicy
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import Sample

INTERRUPTED = 130
HOPELESS = 10
"""If this many tasks fail before the first one succeeds, the evaluation ends."""
GAUGES = ("version", "running", "kv_cache_bytes", "kv_running_bytes", "kv_capacity_tokens")
"""The stats of an engine that cannot be summed over sessions."""

Outcome = TypeVar("Outcome")


class SampleMean(Estimate, frozen=True):
    """An estimate over ``n`` values: one per task, or one per turn if each turn is measured."""

    n: int


def sample_mean(values: Sequence[float], counts: bool = False) -> SampleMean:
    """Measure at least one value. counts: see ``estimate``."""
    found = estimate(values, counts)
    return SampleMean(found.mean, found.half, len(values))


class TaskProgress:
    """Counts finished pieces of work, and prints a line on stderr after every tenth of the total.
    who: the beginning of that line."""

    def __init__(self, total: int, unit: str, before: int = 0, who: str = ""):
        self.total, self.unit, self.done, self.who = total, unit, before, who
        self.start_s = time.monotonic()

    def one(self) -> None:
        self.done += 1
        if self.done * 10 // self.total != (self.done - 1) * 10 // self.total:
            line = f"{self.who}{self.done} of {self.total} {self.unit}"
            seconds = time.monotonic() - self.start_s
            print(f"{line}, {seconds:.0f} s", file=sys.stderr, flush=True)


class EvaluationCosts(msgspec.Struct, frozen=True):
    """The costs of a session, a line of FOLDER/sessions.jsonl, or of all sessions: seconds, and the
    counters of engine and services. A killed session has no line."""

    seconds: float
    engine: dict[str, float]


def total_costs(path: Path) -> EvaluationCosts:
    """The costs of all sessions. Raises InfrastructureFault that names a line which is not a
    session."""
    cut_torn_tail(path)
    seconds, total = 0.0, Counter[str]()
    try:
        for _, session in jsonl.lines(path, EvaluationCosts, "sessions") if path.exists() else ():
            seconds += session.seconds
            total.update(session.engine)
    except ValueError as error:
        raise InfrastructureFault(f"{error}: remove that line; its counts are lost") from None
    return EvaluationCosts(round(seconds, 3), dict(total))


class PolicyRow(msgspec.Struct, frozen=True):
    """A policy with all on which its result depends. name: of its folder in OUT, "" if that is OUT.
    settings: as saved there. budgets: of the sets that have another than config."""

    name: str
    settings: Any
    policy: MeasuredPolicy
    environment: Environment
    config: SchedulerConfig
    budgets: dict[str, int] = {}


class PolicyOutcomes(msgspec.Struct, frozen=True):
    """What a policy did. outcomes: in the order of the tasks. undone: reasons by task."""

    outcomes: list[Any]
    undone: dict[str, str]
    costs: EvaluationCosts


class Evaluation:
    """Policies do ``tasks``, which are (set, task). A subclass says how (``grow``), what remains of
    a tree (``outcome``) and what the result is (``play``, which calls ``examine``).

    workers, handlers: the services besides the policy. unit: the plural name of a task; done: what
    happens to it.
    """

    unit, done = "tasks", "done"

    def __init__(
        self, out: Path, tasks: Sequence[tuple[str, Task]], concurrency: int,
        workers: Sequence[PlugIn] = (), handlers: Mapping[str, Handler] = {},
    ):  # fmt: skip
        self.out, self.tasks, self.concurrency = out, tasks, concurrency
        self.workers, self.handlers = workers, handlers
        self.services: InProcess | None = None
        self.serving: MeasuredPolicy | None = None

    async def run(self) -> Any:
        """Do what is not done yet. May be cancelled at any moment and continued by a later command.
        Raises Fault if it cannot go on, NotStarted if it cannot begin."""
        try:
            return await self.play()
        finally:
            await self.close()

    async def play(self) -> Any:
        raise NotImplementedError

    async def grow(self, row: PolicyRow, context: Context, calls: ResumedCalls) -> None:
        raise NotImplementedError

    def outcome(self, task: Task, tree: Tree | None) -> Any:
        """What the result needs of a task's tree; None if the task could not be done."""
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        engine = self.services.engine if self.services is not None else None
        found = engine.stats() if engine is not None else {}
        return {key: value for key, value in found.items() if key not in GAUGES}

    async def examine(self, row: PolicyRow) -> PolicyOutcomes:
        """A row's tasks, done now or before. Raises InfrastructureFault if none could be done."""
        tasks = _RowTasks(self, row)
        before, who = tasks.progress.done, f"{row.name}: " if row.name else ""
        sessions, start = self.out / row.name / "sessions.jsonl", None
        try:
            if before < len(self.tasks):
                if row.name:
                    left = f"{who}{len(self.tasks) - before} {self.unit}"
                    print(left, file=sys.stderr, flush=True)
                await self._serve(row.policy)
                start = self.stats()
            numbered = enumerate(self.tasks)
            outcomes = await gather(tasks.outcome(position, *task) for position, task in numbered)
        finally:
            if start is not None:
                spent = {key: value - start.get(key, 0.0) for key, value in self.stats().items()}
                seconds = round(time.monotonic() - tasks.progress.start_s, 3)
                done = {self.unit: tasks.progress.done - before}
                cut_torn_tail(sessions)
                append(sessions, {**done, "seconds": seconds, "engine": spent})
            tasks.journal.close()
        if not tasks.progress.done:
            reason = next(iter(tasks.undone.values()), "there is none")
            what = f"{who}no {self.unit} could be {self.done}"
            raise InfrastructureFault(f"{what}; the first reason: {reason}")
        return PolicyOutcomes(outcomes, tasks.undone, total_costs(sessions))

    async def _serve(self, policy: MeasuredPolicy) -> None:
        """Start the services with this policy's engine, unless they run already."""
        if self.services is not None and self.serving is policy:
            return
        await self.close()
        try:
            engine = policy.make()
            self.services, self.serving = InProcess(engine, self.workers, self.handlers), policy
            await self.services.start()
        except (OSError, ValueError, MemoryError) as error:
            raise NotStarted(str(error)) from error
        if policy.load is not None and engine is not None:
            await engine.load(policy.load)

    async def close(self) -> None:
        """Release everything. What is done stays in the folder."""
        if self.services is not None:
            services, self.services = self.services, None
            await services.close()


class _RowTasks:
    """The tasks of a row in the journal of its folder. undone: the reasons of the tasks that could
    not be done."""

    def __init__(self, evaluation: Evaluation, row: PolicyRow):
        self.evaluation, self.row = evaluation, row
        self.journal = Journal(evaluation.out / row.name / "journal.sqlite")
        self.rows = {one.id: one for one in self.journal.trees("split='heldout'")}
        before = sum(one.status == "closed" for one in self.rows.values())
        self.progress = TaskProgress(len(evaluation.tasks), evaluation.unit, before)
        self.room = asyncio.Semaphore(evaluation.concurrency)
        self.undone: dict[str, str] = {}

    async def outcome(self, position: int, of: str, task: Task) -> Any:
        """The outcome of a task's tree, which is in the journal or grown now. of: its set.

        An exception that is not the evaluation's (``scheduler.failures``) gives up its task alone.
        Raises InfrastructureFault if the first ``HOPELESS`` tasks could not be done.
        """
        await self.room.acquire()
        row = self.rows.get(position)
        tree = self.journal.tree(row) if row is not None else None
        if row is None or row.status != "closed":
            actions: Any = tree.actions() if tree is not None else []
            said = [Sample(a.tokens, a.logprobs, a.versions, a.finish) for a in actions]
            tree = Tree(position, task.id, "heldout")
            self.journal.start_tree(tree, position, self.row.settings.version)
            try:
                await self._grow(tree, of, task, said)
            except Exception as error:
                data = isinstance(error, DataFault)
                if not data and (isinstance(error, Fault) or is_of_the_run(error)):
                    raise
                if not data:
                    tree.changed.clear()  # what is not written yet may be what cannot be written
                name = f"{of}/{task.id}" if of else task.id
                self._give_up(tree, name, str(error) if data else traced(error))
                tree = None
            else:
                self.journal.close_tree(tree)
                self.progress.one()
        # After a fault the room stays taken: no further task begins while the evaluation ends.
        self.room.release()
        return self.evaluation.outcome(task, tree)

    async def _grow(self, tree: Tree, of: str, task: Task, said: list[Sample]) -> None:
        row, services = self.row, self.evaluation.services
        assert services is not None, "nothing was started"
        calls: Any = ResumedCalls(services, said)
        config = msgspec.structs.replace(row.config, budget=row.budgets.get(of, row.config.budget))
        runtime = Runtime(
            calls, self.journal, row.policy.text, row.environment, config, Counter(),
            lambda tree, turns: None,
        )  # fmt: skip
        # The draws are those of a run's held-out evaluation of this task, and the same again after
        # an interruption.
        context = Context(runtime, task, tree, random.Random(f"heldout/{tree.id}"))
        await self.evaluation.grow(row, context, calls)

    def _give_up(self, tree: Tree, name: str, reason: str) -> None:
        self.undone[name] = reason
        self.journal.close_tree(tree, "quarantined", reason)
        if len(self.undone) >= HOPELESS and not self.progress.done:
            what = f"the first {HOPELESS} {self.progress.unit} could not be {self.evaluation.done}"
            raise InfrastructureFault(f"{what}; the last reason: {reason}") from None


class Prepared(msgspec.Struct, frozen=True):
    """An evaluation that a command line describes, checked; nothing is started or paid for yet.

    name: of its default folder. settings: saved in OUT; parts: those of inner folders. work: given
    OUT, does the evaluation. shown: the lines of its result. done: what is done to a task.
    """

    name: str
    settings: msgspec.Struct
    work: Callable[[Path], Coroutine[Any, Any, Any]]
    shown: Callable[[Any], str]
    done: str = "answered"
    parts: Sequence[tuple[str, msgspec.Struct]] = ()


def add_output(parser: argparse.ArgumentParser, name: str, out: str = "") -> None:
    """Add the flags of the folder and of the form of the result. out: other words on --out."""
    out = out or f"folder; an evaluation in it is continued (default: evaluations/{name}-TIME)"
    parser.add_argument("--out", type=Path, help=out)
    words = "print the result as JSON instead of a table"
    parser.add_argument("--json", action="store_true", help=words)


def repeated(names: Sequence[str]) -> str | None:
    """A name that is there twice, or None."""
    return min((name for name in names if names.count(name) > 1), default=None)


def run(
    command: str, parser: argparse.ArgumentParser,
    prepare: Callable[[argparse.Namespace], Prepared], arguments: Sequence[str],
) -> int:  # fmt: skip
    """Run a command of coppice evaluate. Returns its exit status."""
    flags = parser.parse_args(arguments)
    try:
        prepared = prepare(flags)
        out = flags.out or own_folder(prepared.name)
        lock = claim(out, prepared.settings, prepared.parts)
    except (OSError, ValueError, MemoryError) as error:
        return gave_up(command, error)
    again = shlex.join([*command.split(), *arguments, *([] if flags.out else ["--out", str(out)])])
    with lock:
        result = conduct(lambda: prepared.work(out), again, prepared.done, command)
    if isinstance(result, int):
        return result
    shown = f"{prepared.shown(result)}\nresult {out / 'result.json'}"
    print(msgspec.json.encode(result).decode() if flags.json else shown)
    return 0


def conduct(
    work: Callable[[], Coroutine[Any, Any, Outcome]], again: str, kept: str, command: str
) -> Outcome | int:
    """Do work that may be continued. Returns its result, or an exit status after printing the
    reason. again: the command that continues it."""
    try:
        result = loop.run(loop.until_signal(work()))
    except NotStarted as error:
        return gave_up(command, error)
    # a JournalError, or a full disk under another file or a read
    except (Fault, OSError, sqlite3.Error) as fault:
        database = f"a database of the evaluation failed ({fault}): is its disk full?"
        reason = database if isinstance(fault, sqlite3.Error) else fault
        return gave_up(command, f"{reason}\nwhat was {kept} is kept; go on with: {again}", 1)
    if result is None:
        print(f"stopped; go on with: {again}", file=sys.stderr)
        return INTERRUPTED
    return result


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in padded]
