"""The harness of all evaluations: what a command does (``run``), and for players that grow trees
``Examination``: every player does the same tasks.

Invariant: every task is a tree of its player's journal and counts once, however often the
evaluation was interrupted.
"""

import argparse
import asyncio
import random
import shlex
import sqlite3
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.common import loop
from coppice.judges.serve import PlugIn
from coppice.scheduler.concurrency import gather
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.failures import is_of_the_run, traced
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating.folder import append, claim, cut_torn_tail, own_folder
from coppice.tools.evaluating.in_process import Handler, InProcess, NotStarted, Seat
from coppice.tools.evaluating.players import Player
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import Sample

INTERRUPTED = 130
HOPELESS = 10
"""If so many tasks fail before the first one succeeds, the evaluation ends."""
GAUGES = ("version", "running", "kv_cache_bytes", "kv_running_bytes", "kv_capacity_tokens")
"""The stats of an engine that cannot be summed over sessions."""

Outcome = TypeVar("Outcome")
Grow = Callable[[Tree, list[Sample]], Awaitable[None]]


class Measured(msgspec.Struct, frozen=True):
    """Mean and half width of the 95% interval over ``n`` values: one per task, or one per turn if
    each turn is measured."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.half:.3f}"


# ----------------------------------------------------------------------------------------------
# tasks that count once


class Progress:
    """Counts finished pieces of work, and prints a line on stderr after every tenth of the total.
    who: the beginning of that line."""

    def __init__(self, total: int, unit: str, before: int = 0, who: str = ""):
        self.total, self.unit, self.done, self.who = total, unit, before, who
        self.start_s = time.monotonic()

    def one(self) -> None:
        """Count one more finished piece."""
        self.done += 1
        if self.done * 10 // self.total != (self.done - 1) * 10 // self.total:
            line = f"{self.who}{self.done} of {self.total} {self.unit}"
            seconds = time.monotonic() - self.start_s
            print(f"{line}, {seconds:.0f} s", file=sys.stderr, flush=True)


class Tasks:
    """The tasks of one journal, by position. ``task`` does one task, unless it was done before;
    ``concurrency`` run at a time.

    unit: the plural name of a task ("games"); done: what happens to it ("played").
    """

    def __init__(self, folder: Path, total: int, unit: str, done: str, concurrency: int):
        self.journal = Journal(folder / "journal.sqlite")
        self.rows: dict[int, TreeRow] = {
            row.id: row for row in self.journal.trees("split='heldout'")
        }
        self.before = sum(row.status == "closed" for row in self.rows.values())
        """The number of tasks done in earlier sessions."""
        self.progress = Progress(total, unit, self.before)
        self.done, self.room = done, asyncio.Semaphore(concurrency)
        self.undone: dict[str, str] = {}
        """The reasons of the tasks that could not be done, by task."""

    @property
    def now(self) -> int:
        """The number of tasks done in this session."""
        return self.progress.done - self.before

    async def task(
        self, position: int, task: str, version: int, grow: Grow, name: str = ""
    ) -> Tree | None:
        """The finished tree of a task, from the journal or grown now; None if the task cannot be
        done.

        ``grow`` gets a new tree, and the samples that the player gave before an interruption. name:
        the task's name if its id is not unique. An exception that is not the evaluation's
        (``scheduler.failures``) gives up its task alone. Raises InfrastructureFault if the first
        ``HOPELESS`` tasks could not be done.
        """
        await self.room.acquire()
        row = self.rows.get(position)
        tree = self.journal.tree(row) if row is not None else None
        if row is None or row.status != "closed":
            said = [_sample(node) for node in tree.actions()] if tree is not None else []
            tree = Tree(position, task, "heldout")
            self.journal.start_tree(tree, position, version)
            tree = await self._grown(tree, said, grow, name or task)
        # after a fault the room stays taken, so that no further task begins while the evaluation
        # ends
        self.room.release()
        return tree

    async def _grown(self, tree: Tree, said: list[Sample], grow: Grow, name: str) -> Tree | None:
        try:
            await grow(tree, said)
        except Exception as error:
            data = isinstance(error, DataFault)
            if not data and (isinstance(error, Fault) or is_of_the_run(error)):
                raise
            if not data:
                tree.changed.clear()  # what is not written yet may be what cannot be written
            reason = self.undone[name] = str(error) if data else traced(error)
            self.journal.close_tree(tree, "quarantined", reason)
            if len(self.undone) >= HOPELESS and not self.now and not self.before:
                raise InfrastructureFault(
                    f"the first {HOPELESS} {self.progress.unit} could not be {self.done}; the last reason: {reason}"
                ) from None
            return None
        self.journal.close_tree(tree)
        self.progress.one()
        return tree


def _sample(action: Node) -> Sample:
    """The sample from which an action node was made."""
    assert action.logprobs is not None, "no action"
    assert action.versions is not None, "no action"
    return Sample(action.tokens, action.logprobs, action.versions, action.finish)  # pyright: ignore[reportArgumentType]


# ----------------------------------------------------------------------------------------------
# costs


class Spent(msgspec.Struct, frozen=True):
    """The costs of a session or of all sessions: seconds, and the engine's counters."""

    seconds: float
    engine: dict[str, float]


class Ledger:
    """FOLDER/sessions.jsonl: one line with the costs of each session that ended or was interrupted;
    a killed session has no line."""

    def __init__(self, folder: Path, unit: str, start_s: float):
        self.path, self.unit, self.start_s = folder / "sessions.jsonl", unit, start_s

    def add(self, done: int, counters: Mapping[str, float]) -> None:
        """Note a session in which ``done`` tasks were finished."""
        seconds = round(time.monotonic() - self.start_s, 3)
        cut_torn_tail(self.path)
        append(self.path, {self.unit: done, "seconds": seconds, "engine": counters})

    def total(self) -> Spent:
        """The costs of all sessions. Raises InfrastructureFault that names a line which is not a
        session."""
        cut_torn_tail(self.path)
        seconds, total = 0.0, Counter[str]()
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                session = msgspec.json.decode(line, type=Spent)
            except msgspec.DecodeError as error:
                raise InfrastructureFault(
                    f"{self.path}:{number} is no session ({error}): remove that line; its counts are lost"
                ) from None
            seconds += session.seconds
            total.update(session.engine)
        return Spent(round(seconds, 3), dict(total))


# ----------------------------------------------------------------------------------------------
# players that grow trees


class Row(msgspec.Struct, frozen=True):
    """A player with all on which its result depends. name: of its folder in OUT, "" if that is OUT.
    settings: as saved there."""

    name: str
    settings: Any
    player: Player
    environment: Environment
    config: SchedulerConfig


class Examined(msgspec.Struct, frozen=True):
    """What a player did. outcomes: in the order of the tasks. undone: reasons by task."""

    outcomes: list[Any]
    undone: dict[str, str]
    spent: Spent


class Examination(ABC, Generic[Outcome]):
    """Players do ``tasks``, which are (set, task). A subclass says how (``grow``), what remains of
    a tree (``outcome``) and what the result is (``play``, which calls ``examine``).

    ``play`` may be cancelled at any moment and continued later; then ``close``. workers, handlers:
    the services besides the player.
    """

    unit, done = "tasks", "done"

    def __init__(
        self, out: Path, tasks: Sequence[tuple[str, Task]], concurrency: int,
        workers: Sequence[PlugIn] = (), handlers: Mapping[str, Handler] = {},
    ):  # fmt: skip
        self.out, self.tasks, self.concurrency = out, tasks, concurrency
        self.workers, self.handlers = workers, handlers
        self.services: InProcess | None = None
        self.serving: Player | None = None

    @abstractmethod
    async def play(self) -> Outcome:
        """Do what is not done yet. Raises Fault if it cannot go on, NotStarted if it cannot begin."""

    @abstractmethod
    async def grow(self, row: Row, of: str, context: Context, seat: Seat) -> None:
        """Grow the context's tree. of: the set of its task."""

    @abstractmethod
    def outcome(self, task: Task, tree: Tree | None) -> Any:
        """What the result needs of a task's tree; None if the task could not be done."""

    def config(self, row: Row, of: str) -> SchedulerConfig:
        """The settings of a set's tasks."""
        return row.config

    def stats(self) -> dict[str, float]:
        """The counters of the services."""
        engine = self.services.engine if self.services is not None else None
        return engine.stats() if engine is not None else {}

    async def examine(self, row: Row) -> Examined:
        """A row's tasks, done now or before. Raises InfrastructureFault if none could be done."""
        folder = self.out / row.name
        tasks = Tasks(folder, len(self.tasks), self.unit, self.done, self.concurrency)
        ledger = Ledger(folder, self.unit, tasks.progress.start_s)
        start: dict[str, float] | None = None
        try:
            if tasks.before < len(self.tasks):
                if row.name:
                    left = f"{row.name}: {len(self.tasks) - tasks.before} {self.unit}"
                    print(left, file=sys.stderr, flush=True)
                await self._serve(row.player)
                start = self.stats()
            outcomes = await gather(
                self._task(row, tasks, position, *task) for position, task in enumerate(self.tasks)
            )
        finally:
            if start is not None:
                counters = {k: v - start.get(k, 0.0) for k, v in self.stats().items()}
                ledger.add(tasks.now, {k: v for k, v in counters.items() if k not in GAUGES})
            tasks.journal.close()
        if not tasks.now and not tasks.before:
            who = f"{row.name}: " if row.name else ""
            reason = next(iter(tasks.undone.values()), "there is none")
            raise InfrastructureFault(
                f"{who}no {self.unit} could be {self.done}; the first reason: {reason}"
            )
        return Examined(outcomes, tasks.undone, ledger.total())

    async def _task(self, row: Row, tasks: Tasks, position: int, of: str, task: Task) -> Any:
        async def grow(tree: Tree, said: list[Sample]) -> None:
            assert self.services is not None, "nothing was started"
            seat: Any = Seat(self.services, said)
            runtime = Runtime(
                seat, tasks.journal, row.player.text, row.environment, self.config(row, of), Counter(),
                lambda tree, turns: None,
            )  # fmt: skip
            # The draws are those of a run's held-out evaluation of this task, and the same again
            # after an interruption.
            context = Context(runtime, task, tree, random.Random(f"heldout/{tree.id}"))
            await self.grow(row, of, context, seat)

        name = f"{of}/{task.id}" if of else task.id
        return self.outcome(
            task, await tasks.task(position, task.id, row.settings.version, grow, name)
        )

    async def _serve(self, player: Player) -> None:
        """Start the services with this player's engine, unless they run already. Raises
        NotStarted."""
        if self.services is not None and self.serving is player:
            return
        await self._rest()
        try:
            engine = player.make()
            self.services = InProcess(engine, self.workers, self.handlers)
            self.serving = player
            await self.services.start()
        except (OSError, ValueError, MemoryError) as error:
            raise NotStarted(str(error)) from error
        if player.load is not None and engine is not None:
            await engine.load(player.load)

    async def _rest(self) -> None:
        if self.services is not None:
            services, self.services, self.serving = self.services, None, None
            await services.close()

    async def close(self) -> None:
        """Release everything. What is done stays in the folder."""
        await self._rest()


# ----------------------------------------------------------------------------------------------
# a command


class Playing(Protocol[Outcome]):  # pyright: ignore[reportInvalidTypeVarUse]
    """An evaluation: ``play`` may be cancelled at any moment and continued by a later command;
    ``close`` releases everything."""

    async def play(self) -> Outcome: ...

    async def close(self) -> None: ...


class Prepared(msgspec.Struct, frozen=True):
    """An evaluation that a command line describes, checked; nothing is started or paid for yet.

    name: of its default folder. settings: saved in OUT; parts: those of inner folders. begin: given
    OUT, the evaluation. shown: the lines of its result. done: what is done to a task ("played").
    """

    name: str
    settings: msgspec.Struct
    begin: Callable[[Path], Playing[Any]]
    shown: Callable[[Any], str]
    done: str = "answered"
    parts: Sequence[tuple[str, msgspec.Struct]] = ()


def add_output(parser: argparse.ArgumentParser, name: str, out: str = "") -> None:
    """Add the flags of the folder and of the form of the result. out: other words on --out."""
    out = out or f"folder; an evaluation in it is continued (default: evaluations/{name}-TIME)"
    parser.add_argument("--out", type=Path, help=out)
    words = "print the result as JSON instead of a table"
    parser.add_argument("--json", action="store_true", help=words)


def run(
    command: str,
    parser: argparse.ArgumentParser,
    prepare: Callable[[argparse.Namespace], Prepared],
    arguments: Sequence[str],
) -> int:
    """Run a command of coppice evaluate. Returns its exit status."""
    flags = parser.parse_args(arguments)
    try:
        prepared = prepare(flags)
        out = flags.out or own_folder(prepared.name)
        lock = claim(out, prepared.settings, prepared.parts)
    except (OSError, ValueError, MemoryError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    again = [*command.split(), *arguments, *([] if flags.out else ["--out", str(out)])]
    with lock:
        result = conduct(lambda: prepared.begin(out), shlex.join(again), prepared.done, command)
    if isinstance(result, int):
        return result
    shown = f"{prepared.shown(result)}\nresult {out / 'result.json'}"
    print(msgspec.json.encode(result).decode() if flags.json else shown)
    return 0


def conduct(
    evaluation: Callable[[], Playing[Outcome]], again: str, kept: str, command: str
) -> Outcome | int:
    """Run an evaluation. Returns its result, or an exit status after printing the reason. again:
    the command that continues it."""
    try:
        result = loop.run(_to_end(evaluation))
    except NotStarted as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    # a JournalError, or a full disk under another file or a read
    except (Fault, OSError, sqlite3.Error) as fault:
        database = f"a database of the evaluation failed ({fault}): is its disk full?"
        reason = database if isinstance(fault, sqlite3.Error) else fault
        print(f"{command}: {reason}\nwhat was {kept} is kept; go on with: {again}", file=sys.stderr)
        return 1
    if result is None:
        print(f"stopped; go on with: {again}", file=sys.stderr)
        return INTERRUPTED
    return result


async def _to_end(make: Callable[[], Playing[Outcome]]) -> Outcome | None:
    evaluation = make()
    playing: Coroutine[Any, Any, Outcome] = evaluation.play()
    work = asyncio.create_task(playing)
    try:
        return work.result() if await loop.or_signal(work) else None
    finally:
        await evaluation.close()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
