"""What evaluations share: a folder for one of them alone, tasks that count once, what was spent, and how a command ends.

Invariant: every task is a tree of the folder's journal and counts once, however often the evaluation was interrupted.
"""

import asyncio
import fcntl
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from scheduler.journal import Journal, TreeRow
from scheduler.tree import Node, Tree
from wire import loop
from wire.atomic import DRAFT, write_whole
from wire.faults import DataFault, Fault, InfrastructureFault
from wire.messages import Sample

INTERRUPTED = 130
PATIENCE_S = 3600.0
"""Deadline of a call: an engine or a service of this process cannot be replaced by another one."""
HOPELESS = 10
"""So many tasks that could not be done, before one that could, end the evaluation."""
SETTINGS = "evaluation.json"
GAUGES = ("version", "running", "kv_cache_bytes")
"""Of an engine's stats, what cannot be summed over sessions."""

Found = TypeVar("Found")
Grow = Callable[[Tree, list[Sample]], Awaitable[None]]


class NotStarted(RuntimeError):
    """The player cannot be had: a model that does not fit, a key that is not set."""


class Measured(msgspec.Struct, frozen=True):
    """Mean and half width of the 95% interval over ``n`` values: tasks, or turns for what is measured of each turn."""

    mean: float
    half: float
    n: int


# ---------------------------------------------------------------------------------------------- the folder


def claim(out: Path, settings: msgspec.Struct, parts: Sequence[tuple[str, msgspec.Struct]] = ()) -> Any:
    """The folder for this evaluation alone, its lock held by the file returned.

    parts: folders inside, each with settings of its own. Raises ValueError when it holds another, or cannot be written.
    """
    try:
        return _claimed(out, settings, parts)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written ({error.strerror or error}): choose another folder") from None


def _claimed(out: Path, settings: msgspec.Struct, parts: Sequence[tuple[str, msgspec.Struct]]) -> Any:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: expected a folder, of this evaluation or not there yet")
    saved = out / SETTINGS
    ours = {"lock", f"{SETTINGS}{DRAFT}"}
    if out.exists() and not saved.is_file() and any(path.name not in ours for path in out.iterdir()):
        raise ValueError(f"--out {out}: it holds something else (no {SETTINGS}); choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    lock = locked(out / "lock", f"--out {out}")
    folders = [(out, settings), *((out / name, own) for name, own in parts)]
    try:
        for folder, own in folders:
            check_same(folder / SETTINGS, own, f"--out {folder}")
        for folder, own in folders:
            folder.mkdir(exist_ok=True)
            keep(folder / SETTINGS, own, f"--out {folder}")
    except (ValueError, OSError):
        lock.close()
        raise
    return lock


def locked(path: Path, what: str) -> Any:
    """``path`` opened and locked for as long as it is open. Raises ValueError when another process holds it; what: named in its message."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{what} is in use by another process: stop that one, or choose another --out") from None
    return lock


def check_same(saved: Path, settings: msgspec.Struct, what: str) -> None:
    """Raises ValueError naming the key in which the settings in ``saved``, if it is there, differ; what: what was begun with them."""
    if not saved.is_file():
        return
    given = msgspec.json.decode(msgspec.json.encode(settings))
    try:
        before = msgspec.json.decode(saved.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{saved} holds no settings ({error}): restore it from a copy, or choose another --out"
        ) from None
    for key in sorted({*given, *before}):
        if before.get(key) != given.get(key):
            raise ValueError(
                f"{what} was begun with {key} = {before.get(key)!r}, now it is {given.get(key)!r}:"
                " give the same settings, or choose another --out"
            )


def keep(path: Path, settings: msgspec.Struct, what: str) -> None:
    """Write the settings of work that may be gone on with. Raises ValueError as ``check_same`` does."""
    check_same(path, settings, what)
    if not path.is_file():
        write_whole(path, settings)


def append(path: Path, row: Any) -> None:
    """One more line of a file that is read back by ``cut_torn_tail`` and a line at a time."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def cut_torn_tail(path: Path) -> None:
    """Cut what stands behind the last whole line of a file, if it is there: a full disk or a killed process left it."""
    if path.is_file():
        whole = path.read_bytes()
        kept = whole.rfind(b"\n") + 1
        if kept != len(whole):
            os.truncate(path, kept)


# ---------------------------------------------------------------------------------------------- its tasks


class Progress:
    """How many pieces of work are done; says so on stderr at every tenth of them. who: the beginning of the line."""

    def __init__(self, total: int, unit: str, before: int = 0, who: str = ""):
        self.total, self.unit, self.done, self.who = total, unit, before, who
        self.start_s = time.monotonic()

    def one(self) -> None:
        """One more is done."""
        self.done += 1
        if self.done * 10 // self.total != (self.done - 1) * 10 // self.total:
            seconds = time.monotonic() - self.start_s
            print(f"{self.who}{self.done} of {self.total} {self.unit}, {seconds:.0f} s", file=sys.stderr, flush=True)


class Kept:
    """The tasks of one journal, by position. ``task`` does one, unless it was done before; ``concurrency`` of them at a time.

    unit: their name; failed: what they could not be, in the message that gives all of them up.
    """

    def __init__(self, folder: Path, total: int, unit: str, failed: str, concurrency: int):
        self.journal = Journal(folder / "journal.sqlite")
        self.rows: dict[int, TreeRow] = {row.id: row for row in self.journal.trees("split='heldout'")}
        self.before = sum(row.status == "closed" for row in self.rows.values())
        """Done in earlier sessions."""
        self.progress = Progress(total, unit, self.before)
        self.failed, self.room = failed, asyncio.Semaphore(concurrency)
        self.undone: dict[str, str] = {}
        """Task -> why it could not be done."""

    @property
    def now(self) -> int:
        """Done in this session."""
        return self.progress.done - self.before

    async def task(self, position: int, task: str, version: int, grow: Grow, name: str = "") -> Tree | None:
        """The finished tree of a task: the one that is kept, or one that is grown now; None when the task cannot be done.

        ``grow`` is given a new tree, and what the player said in the one that an interruption left. name: of the task, where its id is
        not unique. Raises InfrastructureFault when it seems that no task can be done.
        """
        await self.room.acquire()
        row = self.rows.get(position)
        tree = self.journal.tree(row) if row is not None else None
        if row is None or row.status != "closed":
            said = [_sample(node) for node in tree.actions()] if tree is not None else []
            tree = Tree(position, task, "heldout")
            self.journal.start_tree(tree, position, version)
            tree = await self._grown(tree, said, grow, name or task)
        self.room.release()  # one that fails keeps its place, so that nobody begins before the end that it brings
        return tree

    async def _grown(self, tree: Tree, said: list[Sample], grow: Grow, name: str) -> Tree | None:
        try:
            await grow(tree, said)
        except DataFault as fault:
            self._give_up(tree, str(fault), name)
            return None
        self.journal.close_tree(tree)
        self.progress.one()
        return tree

    def _give_up(self, tree: Tree, reason: str, name: str) -> None:
        self.journal.close_tree(tree, "quarantined", reason)
        self.undone[name] = reason
        if len(self.undone) >= HOPELESS and not self.now and not self.before:
            raise InfrastructureFault(
                f"the first {HOPELESS} {self.progress.unit} could {self.failed}; the last reason: {reason}"
            )


def _sample(action: Node) -> Sample:
    """What an action's node was made of."""
    assert action.logprobs is not None, "no action"
    assert action.versions is not None, "no action"
    return Sample(action.tokens, action.logprobs, action.versions, action.finish)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------- what was spent


class Spent(msgspec.Struct, frozen=True):
    """Seconds, and the engine's counters."""

    seconds: float
    engine: dict[str, float]


class Ledger:
    """FOLDER/sessions.jsonl: a line for what was spent between a start and its end or interruption; a killed session has none."""

    def __init__(self, folder: Path, unit: str, start_s: float):
        self.path, self.unit, self.start_s = folder / "sessions.jsonl", unit, start_s
        self.stats: Callable[[], dict[str, float]] | None = None

    def open(self, stats: Callable[[], dict[str, float]]) -> None:
        """Spending begins; ``stats`` are the engine's since then."""
        self.stats = stats

    def close(self, done: int) -> None:
        """Spending has ended; ``done`` tasks were finished. Without effect when none began."""
        if self.stats is None:
            return
        counters = {key: value for key, value in self.stats().items() if key not in GAUGES}
        line = {self.unit: done, "seconds": round(time.monotonic() - self.start_s, 3), "engine": counters}
        self.stats = None
        cut_torn_tail(self.path)
        append(self.path, line)

    def total(self) -> Spent:
        """Over all sessions. Raises InfrastructureFault naming a line that is none."""
        cut_torn_tail(self.path)
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        sessions = [self._session(number, line) for number, line in enumerate(lines, 1)]
        total: Counter[str] = Counter()
        for session in sessions:
            total.update(session.engine)
        return Spent(round(sum(s.seconds for s in sessions), 3), dict(total))

    def _session(self, number: int, line: bytes) -> Spent:
        try:
            return msgspec.json.decode(line, type=Spent)
        except msgspec.DecodeError as error:
            raise InfrastructureFault(
                f"{self.path}:{number} is no session ({error}): remove that line, what it counted is lost"
            ) from None


# ---------------------------------------------------------------------------------------------- how a command ends


class Playing(Protocol[Found]):  # pyright: ignore[reportInvalidTypeVarUse]
    """An evaluation: ``play`` may be cancelled at any moment and gone on with later; ``close`` releases everything."""

    async def play(self) -> Found: ...

    async def close(self) -> None: ...


def conduct(
    evaluation: Callable[[], Playing[Found]], again: str, kept: str, command: str = "tools/evaluate"
) -> Found | int:
    """The result, or the exit status of ``command`` that ended without one, which has said why. again: the command that goes on."""
    try:
        result = loop.run(_to_end(evaluation))
    except NotStarted as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except (Fault, OSError, sqlite3.Error) as fault:  # a JournalError, or a full disk under another file or a read
        reason = (
            f"a database of the evaluation failed ({fault}): is its disk full?"
            if isinstance(fault, sqlite3.Error)
            else fault
        )
        print(f"{command}: {reason}\nwhat was {kept} is kept; go on with: {again}", file=sys.stderr)
        return 1
    if result is None:
        print(f"stopped; go on with: {again}", file=sys.stderr)
        return INTERRUPTED
    return result


async def _to_end(make: Callable[[], Playing[Found]]) -> Found | None:
    evaluation = make()
    playing: Coroutine[Any, Any, Found] = evaluation.play()
    work = asyncio.create_task(playing)
    try:
        return work.result() if await loop.or_signal(work) else None
    finally:
        await evaluation.close()
