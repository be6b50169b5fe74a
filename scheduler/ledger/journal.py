"""The journal makes events durable before anything acts on them: SQLite in WAL mode at
``RUN/journal.sqlite``. Invariant: a group is journaled before it is sent, and marked with the
version that trained it, so after any crash no task or group is lost or trained twice. What is
written within one turn of the event loop is one transaction at its end. A commit survives the death
of the process; after ``sync`` a power cut as well."""

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from coppice.actors.environments.base import RejectedTask
from coppice.common import atomic, vision
from coppice.common.shards import Shard
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.node_codec import MOST, encode_node, restore
from coppice.wire.messages import Turn

_SCHEMA = """
CREATE TABLE IF NOT EXISTS trees (
    id INTEGER PRIMARY KEY, position INTEGER, task TEXT, split TEXT, status TEXT, version INTEGER,
    reason TEXT, time REAL);
CREATE TABLE IF NOT EXISTS nodes (
    tree INTEGER, id INTEGER, body BLOB, PRIMARY KEY (tree, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, tree INTEGER, turns BLOB, trained INTEGER);
CREATE TABLE IF NOT EXISTS rejected (place TEXT PRIMARY KEY, reason TEXT);
CREATE TABLE IF NOT EXISTS evaluations (
    version INTEGER, name TEXT, result TEXT, PRIMARY KEY (version, name));
CREATE TABLE IF NOT EXISTS pictures (number INTEGER PRIMARY KEY, digest TEXT UNIQUE, png BLOB);
CREATE INDEX IF NOT EXISTS groups_by_tree ON groups (tree);
"""

_UNITED = ("trees", "nodes", "groups", "pictures")
"""The tables that each scheduler has its own rows of: their numbers tell them apart."""

LOG_PAGES = 16_384
"""The log's pages (64 MiB) from which a commit moves it into the file; ``sync`` comes before."""


class JournalError(OSError):
    """The journal is damaged, or could not be written while earlier transactions are safe."""


class TreeRow(msgspec.Struct, frozen=True):
    """A row of trees. status: growing, closed, replaced or quarantined. position: the draw of the
    task. time: of the draw, in seconds since 1970."""

    id: int
    position: int
    task: str
    split: str
    status: str
    version: int
    reason: str | None
    time: float


class Journal:
    """A scheduler's journal until ``close``. It alone writes; others read. shard: whose numbers the
    pictures get. others: journals of other schedulers, read together with this one."""

    def __init__(
        self,
        path: Path,
        readonly: bool = False,
        shard: Shard = Shard(),
        others: Sequence[Path] = (),
    ):
        self.path, self._shard = path, shard
        self.failure: JournalError | None = None
        self._due: list[tuple[str, list[Sequence[object]]]] = []
        self._turn: asyncio.Future[None] | None = None
        if readonly:
            if not path.is_file():
                raise FileNotFoundError(f"no journal at {path}: is this a run folder?")
            self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            names = [f"other{number}" for number in range(len(others))]
            for name, other in zip(names, others, strict=True):
                self._db.execute(f"ATTACH ? AS {name}", (f"file:{other}?mode=ro",))
            for table in _UNITED if others else ():
                parts = (f"SELECT * FROM {name}.{table}" for name in ("main", *names))
                self._db.execute(f"CREATE TEMP VIEW {table} AS {' UNION ALL '.join(parts)}")
        else:
            self._db = sqlite3.connect(path)
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
                self._db.executescript(_SCHEMA)
                # a file that was cut short opens without an error
                ((found,),) = self._db.execute("PRAGMA quick_check(1)")
                if found != "ok":
                    raise sqlite3.DatabaseError(" ".join(found.split()))
            except sqlite3.DatabaseError as error:
                self._db.close()
                raise JournalError(
                    f"journal {path} cannot be used ({error}): if its disk is full or read-only,"
                    " mend that; if it is damaged, restore it from a copy; then resume the run"
                ) from error

    def _write(self, *statements: tuple[str, Iterable[Sequence[object]]]) -> None:
        """Execute statements in this turn's transaction. Raises an earlier failure."""
        if self.failure is not None:
            raise self.failure
        self._due += [(statement, list(rows)) for statement, rows in statements]
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._turn is None:
            self._turn = loop.create_future()
            loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        with contextlib.suppress(JournalError):  # whoever waits or writes next gets it
            self.flush()

    def flush(self) -> None:
        """Commit what is not committed yet. Raises JournalError."""
        due, turn, self._due, self._turn = self._due, self._turn, [], None
        try:
            if due:
                self._commit(due)
        except (sqlite3.Error, ValueError, OverflowError) as error:
            # the last two: of a text or a number that SQLite cannot hold
            remedy = "mend the task or the plug-in that gave what SQLite cannot hold"
            if isinstance(error, sqlite3.OperationalError):
                remedy = "free some space"
            self.failure = JournalError(
                f"journal {self.path} could not be written ({error}): {remedy}, then resume the run"
            )
            self.failure.__cause__ = error
        if turn is not None and not turn.done():
            turn.set_result(None)
        if self.failure is not None:
            raise self.failure

    def _commit(self, statements: list[tuple[str, list[Sequence[object]]]]) -> None:
        with self._db:
            for statement, rows in statements:
                self._db.executemany(statement, rows)

    async def written(self) -> None:
        """Wait until everything written so far is committed. Raises JournalError."""
        if self._turn is not None:
            await asyncio.shield(self._turn)
        if self.failure is not None:
            raise self.failure

    def _rows(self, query: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        self.flush()
        return self._db.execute(query, values)

    def _number(self, selected: str) -> int:
        return self._rows(f"SELECT {selected}").fetchone()[0]

    def start_tree(self, tree: Tree, position: int, version: int) -> None:
        """Record that a task was drawn, with its tree's nodes so far."""
        row = (tree.id, position, tree.task, tree.split, "growing", version, None, time.time())
        tree.changed = dict(tree.nodes)
        self.save_nodes(tree, ("INSERT OR REPLACE INTO trees VALUES (?,?,?,?,?,?,?,?)", [row]))

    def save_nodes(self, tree: Tree, *statements: tuple[str, Iterable[Sequence[object]]]) -> None:
        """Write the tree's changed nodes and execute ``statements``, in one transaction."""
        nodes = [(tree.id, node.id, encode_node(node, tree)) for node in tree.changed.values()]
        self._write(("INSERT OR REPLACE INTO nodes VALUES (?,?,?)", nodes), *statements)
        tree.changed.clear()

    def save_group(self, tree: Tree, group: int, turns: list[Turn]) -> None:
        """Write a group and its tree's changed nodes. The group may be sent after ``written``."""
        row = (group, tree.id, msgspec.msgpack.encode(turns))
        self.save_nodes(tree, ("INSERT OR IGNORE INTO groups VALUES (?,?,?,NULL)", [row]))

    def close_tree(self, tree: Tree, status: str = "closed", reason: str | None = None) -> None:
        """Record that the tree grows no more, and write its changed nodes."""
        row = status, reason and reason[:MOST], tree.id
        self.save_nodes(tree, ("UPDATE trees SET status=?, reason=? WHERE id=?", [row]))

    def mark_trained(self, group: int, version: int) -> None:
        """Record that ``version`` was trained on ``group``."""
        self._write(("UPDATE groups SET trained=? WHERE id=?", [(version, group)]))

    def picture(self, png: bytes) -> int:
        """The number of a picture (``common.vision``), which its first use writes."""
        digest = hashlib.sha256(png).hexdigest()
        query = "SELECT number FROM pictures WHERE digest=?"
        if (row := self._rows(query, (digest,)).fetchone()) is not None:
            return row[0]
        number = self._shard.after(self._number("COALESCE(MAX(number), 0) FROM pictures"))
        self._write(("INSERT INTO pictures VALUES (?,?,?)", [(number, digest, png)]))
        return number

    def reject(self, rejected: Iterable[RejectedTask]) -> None:
        """Record tasks that cannot work, with the reasons."""
        rows = [(row.where, row.reason) for row in rejected]
        self._write(("INSERT OR REPLACE INTO rejected VALUES (?,?)", rows))

    def save_evaluation(self, version: int, name: str, result: dict[str, object]) -> None:
        """Write the result of an evaluation, which is committed at once."""
        row = version, name, json.dumps(result)
        self._write(("INSERT OR REPLACE INTO evaluations VALUES (?,?,?)", [row]))
        self.flush()

    def sync(self) -> None:
        """Wait until all commits are on the disk and in the file. Any thread may call this."""
        # SQLite has moved the log into the file, and synced that
        with contextlib.suppress(FileNotFoundError):
            atomic.sync(self.path.with_name(self.path.name + "-wal"))
        full = contextlib.suppress(sqlite3.OperationalError)  # the next commit tells a full disk
        with full, contextlib.closing(sqlite3.connect(self.path)) as other:
            other.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def forget_training_after(self, version: int) -> None:
        """On resume, forget what was trained and evaluated after the checkpoint's ``version``."""
        lost = [(version,)]
        self._write(
            ("UPDATE groups SET trained=NULL WHERE trained>?", lost),
            ("DELETE FROM evaluations WHERE version>?", lost),
        )

    def adopt_frontier(self, trained: dict[int, int]) -> None:
        """On resume, mark groups of the checkpoint whose answers the crash lost."""
        rows = [(version, group) for group, version in trained.items()]
        self._write(("UPDATE groups SET trained=? WHERE id=? AND trained IS NULL", rows))

    def uproot(self, tree: int) -> None:
        """Remove the nodes and groups of a tree that is to grow anew."""
        for table in ("nodes", "groups"):
            self._write((f"DELETE FROM {table} WHERE tree=?", [(tree,)]))

    def changes(self) -> int:
        """The number of rows that this start has written: it stands still without progress."""
        return self._db.total_changes

    def trees(self, where: str = "1", *values: object) -> list[TreeRow]:
        """The rows of trees that meet an SQL condition on their columns."""
        query = (
            f"SELECT {', '.join(TreeRow.__struct_fields__)} FROM trees WHERE {where} ORDER BY id"
        )
        return [TreeRow(*row) for row in self._rows(query, values)]

    def tree(self, row: TreeRow) -> Tree:
        """The tree of a row, with its nodes and group ids."""
        blobs = self._rows("SELECT body FROM nodes WHERE tree=? ORDER BY id", (row.id,))
        tree = Tree(row.id, row.task, row.split)
        restore(tree, (body for (body,) in blobs))
        tree.groups = [group for group, _ in self.groups(row.id)]
        return tree

    def groups(self, tree: int) -> list[tuple[int, int | None]]:
        """The groups of a tree, each with the version that trained it, None if none has."""
        return list(self._rows("SELECT id, trained FROM groups WHERE tree=? ORDER BY id", (tree,)))

    def turns(self, group: int) -> list[Turn]:
        """The turns of a group."""
        ((body,),) = self._rows("SELECT turns FROM groups WHERE id=?", (group,))
        return msgspec.msgpack.decode(body, type=list[Turn])

    def pictures(self, tokens: np.ndarray) -> dict[int, bytes]:
        """The PNG bytes of the pictures among ``tokens``, by number."""
        query = "SELECT png FROM pictures WHERE number=?"
        return {n: self._rows(query, (n,)).fetchone()[0] for n in vision.numbers(tokens)}

    def untrained_trees(self) -> list[TreeRow]:
        """Training trees that grow, or have a group on which no version was trained."""
        return self.trees(
            "split='train' AND (status='growing' OR EXISTS"
            " (SELECT 1 FROM groups WHERE tree=trees.id AND trained IS NULL))"
        )

    def lacks(self, trained: Iterable[int]) -> list[int]:
        """The groups of ``trained`` that are not here, or whose tree still grows."""
        query = "SELECT groups.id FROM groups JOIN trees ON trees.id=tree WHERE status!='growing'"
        return sorted(set(trained) - {group for (group,) in self._rows(query)})

    def tally(self) -> dict[str, int]:
        """The number of training trees by status."""
        query = "SELECT status, COUNT(*) FROM trees WHERE split='train' GROUP BY status"
        return dict(self._rows(query))

    def next_tree(self) -> int:
        """An unused tree id."""
        return self._number("COALESCE(MAX(id), -1) + 1 FROM trees")

    def next_group(self) -> int:
        """An unused group id."""
        return self._number("COALESCE(MAX(id), -1) + 1 FROM groups")

    def next_position(self) -> int:
        """The first draw that was never made."""
        return self._number("COALESCE(MAX(position), -1) + 1 FROM trees WHERE split='train'")

    def quarantined(self) -> list[tuple[str, str]]:
        """The rows and trees that could not work, as pairs of place and reason."""
        trees = self.trees("status='quarantined'")
        rows = list(self._rows("SELECT place, reason FROM rejected"))
        return rows + [(f"task {tree.task}", tree.reason or "") for tree in trees]

    def evaluations(self) -> list[tuple[int, str, dict[str, float]]]:
        """The evaluations as (version, name, result), oldest first."""
        rows = self._rows("SELECT version, name, result FROM evaluations ORDER BY version")
        return [(version, name, json.loads(result)) for version, name, result in rows]

    def close(self) -> None:
        """Commit what is left, and close the file."""
        with contextlib.suppress(JournalError):  # the run ends with it
            self.flush()
        self._db.close()
