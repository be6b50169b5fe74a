"""What all evaluations share: an exclusive folder, tasks that count once, a ledger of the costs,
and the end of a command.

Invariant: every task is a tree of the folder's journal and counts once, however often the
evaluation was interrupted.
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

from coppice.common import loop
from coppice.common.atomic import DRAFT, fresh, write_whole
from coppice.scheduler.growth.failures import is_of_the_run, traced
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import Sample

INTERRUPTED = 130
PATIENCE_S = 3600.0
"""The deadline of a call. It is long because no other engine or service could take over from the
one in this process."""
HOPELESS = 10
"""If so many tasks fail before the first one succeeds, the evaluation ends."""
SETTINGS = "evaluation.json"
GAUGES = ("version", "running", "kv_cache_bytes")
"""The stats of an engine that cannot be summed over sessions."""

Outcome = TypeVar("Outcome")
Grow = Callable[[Tree, list[Sample]], Awaitable[None]]


class NotStarted(RuntimeError):
    """The player could not be started, for example because the model does not fit or an API key is
    not set."""


class Measured(msgspec.Struct, frozen=True):
    """Mean and half width of the 95% interval over ``n`` values: one per task, or one per turn if
    each turn is measured."""

    mean: float
    half: float
    n: int


# ---------------------------------------------------------------------------------------------- the
# folder


def claim(
    out: Path, settings: msgspec.Struct, parts: Sequence[tuple[str, msgspec.Struct]] = ()
) -> Any:
    """Claim the folder for this evaluation alone. Returns the lock file, which holds the lock while
    it is open.

    parts: inner folders with their own settings. Raises ValueError if the folder holds another
    evaluation or cannot be written.
    """
    try:
        return _claimed(out, settings, parts)
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written ({error.strerror or error}): choose another folder"
        ) from None


def _claimed(
    out: Path, settings: msgspec.Struct, parts: Sequence[tuple[str, msgspec.Struct]]
) -> Any:
    if out.exists() and not out.is_dir():
        raise ValueError(
            f"--out {out} is a file: expected a folder of this evaluation, or one that does not exist yet"
        )
    saved = out / SETTINGS
    ours = {"lock", f"{SETTINGS}{DRAFT}"}
    if (
        out.exists()
        and not saved.is_file()
        and any(path.name not in ours for path in out.iterdir())
    ):
        raise ValueError(f"--out {out} holds something else (no {SETTINGS}): choose another folder")
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


def own_folder(name: str) -> Path:
    """Make a folder for an evaluation that was given none: its name, and the time. Raises
    ValueError if it cannot be made."""
    out = Path("evaluations") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        return fresh(out)
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written ({error.strerror or error}): choose another folder"
        ) from None


def locked(path: Path, subject: str) -> Any:
    """Open ``path`` and lock it while it is open. Raises ValueError, naming the locked ``subject``,
    if another process holds the lock."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"{subject} is in use by another process: stop it, or choose another --out"
        ) from None
    return lock


def check_same(saved: Path, settings: msgspec.Struct, subject: str) -> None:
    """Raises ValueError that names the first key in which ``saved``, if it exists, differs.
    subject: the work with these settings."""
    if not saved.is_file():
        return
    current = msgspec.json.decode(msgspec.json.encode(settings))
    try:
        before = msgspec.json.decode(saved.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{saved} holds no settings ({error}): restore it from a copy, or choose another --out"
        ) from None
    for key in sorted({*current, *before}):
        if before.get(key) != current.get(key):
            raise ValueError(
                f"{subject} was begun with {key} = {before.get(key)!r}, now it is {current.get(key)!r}:"
                " give the same settings, or choose another --out"
            )


def keep(path: Path, settings: msgspec.Struct, subject: str) -> None:
    """Write the settings of work that may be continued later. Raises ValueError as ``check_same``
    does."""
    check_same(path, settings, subject)
    if not path.is_file():
        write_whole(path, settings)


def append(path: Path, row: Any) -> None:
    """Append one JSON line to a file. A reader calls ``cut_torn_tail`` first, then reads line by
    line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def cut_torn_tail(path: Path) -> None:
    """Remove an incomplete last line from a file, if the file exists. A full disk or a killed
    process leaves such a line."""
    if path.is_file():
        whole = path.read_bytes()
        kept = whole.rfind(b"\n") + 1
        if kept != len(whole):
            os.truncate(path, kept)


# ---------------------------------------------------------------------------------------------- its
# tasks


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
            seconds = time.monotonic() - self.start_s
            print(
                f"{self.who}{self.done} of {self.total} {self.unit}, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )


class Kept:
    """The tasks of one journal, by position. ``task`` does one task, unless it was done before;
    ``concurrency`` run at a time.

    unit: the plural name of a task ("games"); failed: how it fails ("not be played"), for the error
    that gives up all tasks.
    """

    def __init__(self, folder: Path, total: int, unit: str, failed: str, concurrency: int):
        self.journal = Journal(folder / "journal.sqlite")
        self.rows: dict[int, TreeRow] = {
            row.id: row for row in self.journal.trees("split='heldout'")
        }
        self.before = sum(row.status == "closed" for row in self.rows.values())
        """The number of tasks done in earlier sessions."""
        self.progress = Progress(total, unit, self.before)
        self.failed, self.room = failed, asyncio.Semaphore(concurrency)
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
        except DataFault as fault:
            self._give_up(tree, str(fault), name)
            return None
        except Fault:
            raise
        except Exception as error:
            if is_of_the_run(error):
                raise
            tree.changed.clear()  # what is not written yet may be what cannot be written
            self._give_up(tree, traced(error), name)
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
        self.stats: Callable[[], dict[str, float]] | None = None

    def open(self, stats: Callable[[], dict[str, float]]) -> None:
        """Begin a session. stats: returns the engine's counters since this moment."""
        self.stats = stats

    def close(self, done: int) -> None:
        """End the session, in which ``done`` tasks were finished. Has no effect if no session is
        open."""
        if self.stats is None:
            return
        counters = {key: value for key, value in self.stats().items() if key not in GAUGES}
        line = {
            self.unit: done,
            "seconds": round(time.monotonic() - self.start_s, 3),
            "engine": counters,
        }
        self.stats = None
        cut_torn_tail(self.path)
        append(self.path, line)

    def total(self) -> Spent:
        """The costs of all sessions. Raises InfrastructureFault that names a line which is not a
        session."""
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
                f"{self.path}:{number} is no session ({error}): remove that line; its counts are lost"
            ) from None


# ---------------------------------------------------------------------------------------------- how
# a command ends


class Playing(Protocol[Outcome]):  # pyright: ignore[reportInvalidTypeVarUse]
    """An evaluation: ``play`` may be cancelled at any moment and continued by a later command;
    ``close`` releases everything."""

    async def play(self) -> Outcome: ...

    async def close(self) -> None: ...


def conduct(
    evaluation: Callable[[], Playing[Outcome]],
    again: str,
    kept: str,
    command: str = "coppice evaluate",
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


async def _to_end(make: Callable[[], Playing[Outcome]]) -> Outcome | None:
    evaluation = make()
    playing: Coroutine[Any, Any, Outcome] = evaluation.play()
    work = asyncio.create_task(playing)
    try:
        return work.result() if await loop.or_signal(work) else None
    finally:
        await evaluation.close()
