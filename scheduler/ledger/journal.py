"""The journal makes events durable before anything acts on them: SQLite in WAL mode at
``RUN/journal.sqlite``. Invariant: a group is journaled before it is sent, and marked with the
version that trained it, so after any crash no task or group is lost or trained twice. What is
written within one turn of the event loop is one transaction at its end. A commit survives the death
of the process; after ``sync`` a power cut as well. Each row has a checksum of all that never
changes in it (only status, reason and trained do), which readers compare. Of a tree that retention
removes, its row and its groups stay, without nodes and turns."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from coppice.actors.environments.base import RejectedTask
from coppice.common import atomic, vision
from coppice.common.shards import Shard
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.node_codec import MOST, deflated, encode_node, inflated, restore
from coppice.wire.messages import Turn

FORMAT = 2  # PRAGMA user_version; 0 had no checksums, and bodies were not deflated in 1
_TABLES = {
    "trees": "id INTEGER PRIMARY KEY, position INTEGER, task TEXT, split TEXT, version INTEGER,"
    " time REAL, digest TEXT, sum INT, status TEXT, reason TEXT)",
    "nodes": "tree INTEGER, id INTEGER, body BLOB, sum INT, PRIMARY KEY (tree, id))",
    "groups": "id INTEGER PRIMARY KEY, tree INTEGER, turns BLOB, sum INT, trained INTEGER)",
    "rejected": "place TEXT PRIMARY KEY, reason TEXT, sum INT)",
    "evaluations": "version INTEGER, name TEXT, result TEXT, sum INT, UNIQUE (version, name))",
    "pictures": "number INTEGER PRIMARY KEY, digest TEXT UNIQUE, png BLOB, sum INT)",
    "starts": "number INTEGER PRIMARY KEY, time REAL, inputs TEXT, sum INT)",
}
"""The columns of each table. The checksum is of those before it."""
_FIXED = {one: re.findall(r"(?:^|, )(\w+)", _TABLES[one].split(", sum")[0]) for one in _TABLES}
_CREATE = "".join(f"CREATE TABLE IF NOT EXISTS {one} ({_TABLES[one]};\n" for one in _TABLES)
_SCHEMA = f"""BEGIN; {_CREATE}
CREATE INDEX IF NOT EXISTS groups_by_tree ON groups (tree);
CREATE INDEX IF NOT EXISTS kept ON trees (version) WHERE reason IS NULL AND split='train';
PRAGMA user_version={FORMAT}; COMMIT;"""

Inputs = dict[str, tuple[str, str]]
"""What trees are made from, by setting: files with their SHA-256, values with themselves."""
MOST_JOURNALS = 11
"""SQLite reads one with ten attached databases."""
_UNITED = ("trees", "nodes", "groups", "pictures")
"""The tables that each scheduler has its own rows of: their numbers tell them apart."""

LOG_PAGES = 16_384
"""The log's pages (64 MiB) from which a commit moves it into the file; ``sync`` comes before."""


class JournalError(OSError):
    """The journal is damaged, or could not be written while earlier transactions are safe."""


REMOVED = "removed by retention (scheduler.keep_versions)"
"""The reason of a tree whose nodes and turns are gone."""
_NO_TURNS = deflated(msgspec.msgpack.encode([]))


class TreeRow(msgspec.Struct, frozen=True):
    """A row of trees. position: the draw of the task. time: of the draw, in seconds since 1970.
    digest: of the task. reason: of a quarantined tree, or ``REMOVED``."""

    id: int
    position: int
    task: str
    split: str
    version: int
    time: float
    digest: str
    status: Literal["growing", "closed", "replaced", "quarantined"]
    reason: str | None

    @property
    def removed(self) -> bool:
        """Whether retention has removed its nodes and turns."""
        return self.reason == REMOVED


_STATUSES = get_args(TreeRow.__annotations__["status"])
REMEDY = "a resume grows untrained trees anew, and only a copy of the file has the others"


def _summed(*values: object) -> tuple[object, ...]:
    """The values of a row, and their checksum, a CRC-32."""
    total = 0
    for value in values:
        total = zlib.crc32(value if isinstance(value, bytes) else f"{value!r},".encode(), total)
    return *values, total


def _for_reading(path: Path) -> str:
    """Return the URI of a journal that is only read. In a folder where nobody may write, SQLite
    opens a journal without a log only if it is told that nothing changes."""
    writable = os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro{'' if writable else '&immutable=1'}"


def _read_ahead(path: Path) -> None:
    """Bring a file into memory. The check of its pages reads them in another order than they lie on
    the disk, which took 12 times as long. Later this would end SQLite's locks on the file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while file.read(1 << 24):
            pass


class Journal(contextlib.AbstractContextManager["Journal"]):
    """A scheduler's journal until ``close``. It alone writes; others read. shard: whose numbers the
    pictures get. others: journals of other schedulers, read together with this one."""

    def __init__(
        self, path: Path, readonly: bool = False, shard: Shard = Shard(),
        others: Sequence[Path] = (),
    ):  # fmt: skip
        self.path, self._shard = path, shard
        self.failure: JournalError | None = None
        self._due: list[tuple[str, list[Sequence[object]]]] = []
        self._turn: asyncio.Future[None] | None = None
        if readonly:
            if not path.is_file():
                raise FileNotFoundError(f"no journal at {path}: is this a run folder?")
            self._db = sqlite3.connect(_for_reading(path), uri=True)
            self._check_format()
            names = [f"other{number}" for number in range(len(others))]
            for name, other in zip(names, others, strict=True):
                self._db.execute(f"ATTACH ? AS {name}", (_for_reading(other),))
            for table in _UNITED if others else ():
                parts = (f"SELECT * FROM {name}.{table}" for name in ("main", *names))
                self._db.execute(f"CREATE TEMP VIEW {table} AS {' UNION ALL '.join(parts)}")
        else:
            _read_ahead(path)
            self._db = sqlite3.connect(path)
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
                self._check_format()
                self._db.executescript(_SCHEMA)
                self.check_pages()
                for table in _TABLES:
                    deque(self._read(table, "LIMIT 0"), 0)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                self._db.close()
                raise JournalError(
                    f"journal {path} cannot be used ({error}): if its disk has no room or is"
                    " read-only, mend that, else restore a copy of it; then resume the run"
                ) from error
        # a damaged text may not be UTF-8
        self._db.text_factory = lambda text: text.decode(errors="backslashreplace")

    def _check_format(self) -> None:
        ((version,),) = self._db.execute("PRAGMA user_version")
        if version != FORMAT and [*self._db.execute("SELECT 1 FROM sqlite_master")]:
            remedy = f"not {FORMAT}: go on with the release that wrote it"
            raise JournalError(f"journal {self.path} has format {version}, {remedy}")

    def check_pages(self) -> None:
        """Raises sqlite3.DatabaseError if the file is cut, or its pages do not fit together."""
        ((found,),) = self._db.execute("PRAGMA integrity_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))

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
            mend = "mend the task or the plug-in that gave what SQLite cannot hold"
            remedy = "free some space" if isinstance(error, sqlite3.OperationalError) else mend
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

    def _read(
        self, table: str, rest: str, values: Sequence[object] = (), damage: list[str] | None = None
    ) -> Iterator[list[Any]]:
        """Yield rows without their checksums. Names of damaged rows are added to ``damage``; None:
        such a row raises ValueError."""
        fixed, more = _FIXED[table], ["status", "reason"] * (table == "trees")
        columns = ", ".join([*fixed, *more, "sum"])
        for *row, sum in self._rows(f"SELECT {columns} FROM {table} {rest}", values):
            intact = (*row[: len(fixed)], sum) == _summed(*row[: len(fixed)])
            name = f"{fixed[0]} {row[0]}, {fixed[1]} {row[1]} of {table}"[:200]
            if intact and (not more or row[len(fixed)] in _STATUSES):
                yield row
            elif damage is None:
                raise ValueError(f"journal {self.path} is damaged in {name}: {REMEDY}")
            else:
                damage.append(name)

    def damage(self) -> list[str]:
        """The names of all rows that are not what was written, those of trees first."""
        damage: list[str] = []
        for table in _TABLES:
            deque(self._read(table, "", (), damage), 0)
        return damage

    def begin(self, inputs: Inputs) -> None:
        """Record a start of the run."""
        number = self._number("COALESCE(MAX(number), 0) + 1 FROM starts")
        row = _summed(number, time.time(), json.dumps(inputs))
        self._write(("INSERT INTO starts VALUES (?,?,?,?)", [row]))

    def starts(self) -> list[tuple[int, float, Inputs]]:
        """The starts as (number, seconds since 1970, inputs), oldest first, without damage."""
        rows = self._read("starts", "ORDER BY number", (), [])
        return [(number, at, json.loads(inputs)) for number, at, inputs in rows]

    def _number(self, selected: str) -> int:
        return self._rows(f"SELECT {selected}").fetchone()[0]

    def start_tree(self, tree: Tree, position: int, version: int, digest: str = "") -> None:
        """Record that a task was drawn, with its digest and its tree's nodes so far."""
        fixed = tree.id, position, tree.task, tree.split, version, time.time(), digest
        row = *_summed(*fixed), "growing", None
        tree.changed = dict(tree.nodes)
        self.save_nodes(tree, ("INSERT OR REPLACE INTO trees VALUES (?,?,?,?,?,?,?,?,?,?)", [row]))

    def save_nodes(self, tree: Tree, *statements: tuple[str, Iterable[Sequence[object]]]) -> None:
        """Write the tree's changed nodes and execute ``statements``, in one transaction."""
        bodies = ((n.id, deflated(encode_node(n, tree))) for n in tree.changed.values())
        nodes = [_summed(tree.id, *body) for body in bodies]
        self._write(("INSERT OR REPLACE INTO nodes VALUES (?,?,?,?)", nodes), *statements)
        tree.changed.clear()

    def save_group(self, tree: Tree, group: int, turns: list[Turn]) -> None:
        """Write a group and its tree's changed nodes. The group may be sent after ``written``."""
        row = _summed(group, tree.id, deflated(msgspec.msgpack.encode(turns)))
        self.save_nodes(tree, ("INSERT OR IGNORE INTO groups VALUES (?,?,?,?,NULL)", [row]))

    def close_tree(self, tree: Tree, status: str = "closed", reason: str | None = None) -> None:
        """Record that the tree grows no more, and write its changed nodes."""
        row = status, reason and reason[:MOST].encode(errors="replace").decode(), tree.id
        self.save_nodes(tree, ("UPDATE trees SET status=?, reason=? WHERE id=?", [row]))

    def mark_trained(self, group: int, version: int) -> None:
        """Record that ``version`` was trained on ``group``."""
        self._write(("UPDATE groups SET trained=? WHERE id=?", [(version, group)]))

    def picture(self, png: bytes) -> int:
        """The number of a picture (``common.vision``), which its first use writes."""
        digest = hashlib.sha256(png).hexdigest()
        query = "SELECT number FROM pictures WHERE digest=? AND png=?"
        if (row := self._rows(query, (digest, png)).fetchone()) is not None:
            return row[0]
        number = self._shard.after(self._number("COALESCE(MAX(number), 0) FROM pictures"))
        row = _summed(number, digest, png)
        self._write(("INSERT OR REPLACE INTO pictures VALUES (?,?,?,?)", [row]))
        return number

    def reject(self, rejected: Iterable[RejectedTask]) -> None:
        """Record tasks that cannot work, with the reasons."""
        rows = [_summed(row.where, row.reason) for row in rejected]
        self._write(("INSERT OR REPLACE INTO rejected VALUES (?,?,?)", rows))

    def save_evaluation(self, version: int, name: str, result: dict[str, object]) -> None:
        """Write the result of an evaluation, which is committed at once."""
        row = _summed(version, name, json.dumps(result))
        self._write(("INSERT OR REPLACE INTO evaluations VALUES (?,?,?,?)", [row]))
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
        """On resume, mark the groups of the checkpoint, whose answers the crash may have lost."""
        rows = [(version, group, version) for group, version in trained.items()]
        self._write(("UPDATE groups SET trained=? WHERE id=? AND trained IS NOT ?", rows))

    def uproot(self, tree: int) -> None:
        """Remove the nodes and groups of a tree that is to grow anew."""
        for table in ("nodes", "groups"):
            self._write((f"DELETE FROM {table} WHERE tree=?", [(tree,)]))

    def finished(self, version: int) -> list[int]:
        """The ids of training trees with nodes that ended, and of which every group was trained by
        ``version`` at the latest: the 4096 oldest. None was quarantined, whose nodes say why."""
        query = (
            "SELECT id FROM trees INDEXED BY kept WHERE reason IS NULL AND split='train' AND"
            " version<?1 AND status IN ('closed', 'replaced') AND NOT EXISTS (SELECT 1 FROM groups"
            " WHERE tree=trees.id AND (trained IS NULL OR trained>?1)) ORDER BY version LIMIT 4096"
        )
        return [tree for (tree,) in self._rows(query, (version,))]

    def remove(self, tree: int) -> None:
        """Remove the nodes of a ``finished`` tree and the turns of its groups, in one transaction.
        Resumes and audits count by what stays. SQLite writes new rows where the old ones were."""
        groups = [(*_summed(group, tree, _NO_TURNS)[2:], group) for group, _ in self.groups(tree)]
        self._write(
            ("DELETE FROM nodes WHERE tree=?", [(tree,)]),
            ("UPDATE groups SET turns=?, sum=? WHERE id=?", groups),
            ("UPDATE trees SET reason=? WHERE id=?", [(REMOVED, tree)]),
        )

    def changes(self) -> int:
        """The number of rows that this start has written: it stands still without progress."""
        return self._db.total_changes

    def trees(self, where: str = "1", *values: object) -> list[TreeRow]:
        """The rows of trees that meet an SQL condition on their columns."""
        return [TreeRow(*row) for row in self._read("trees", f"WHERE {where} ORDER BY id", values)]

    def tree(self, row: TreeRow) -> Tree:
        """The tree of a row, with its nodes and group ids. Raises ValueError for a damaged one."""
        nodes = self._read("nodes", "WHERE tree=? ORDER BY id", (row.id,))
        tree = Tree(row.id, row.task, row.split)
        restore(tree, (inflated(body) for *_, body in nodes))
        tree.groups = [group for group, _ in self.groups(row.id)]
        return tree

    def groups(self, tree: int) -> list[tuple[int, int | None]]:
        """The groups of a tree, each with the version that trained it, None if none has."""
        return list(self._rows("SELECT id, trained FROM groups WHERE tree=? ORDER BY id", (tree,)))

    def turns(self, group: int) -> list[Turn]:
        """The turns of a group. Raises ValueError if they are damaged."""
        ((*_, body),) = self._read("groups", "WHERE id=?", (group,))
        return msgspec.msgpack.decode(inflated(body), type=list[Turn])

    def pictures(self, tokens: np.ndarray) -> dict[int, bytes]:
        """The PNG bytes of the pictures among ``tokens``, by number. Raises ValueError if one is
        damaged or not there."""
        pictures = {}
        for number in vision.numbers(tokens):
            ((*_, pictures[number]),) = self._read("pictures", "WHERE number=?", (number,))
        return pictures

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
        """The evaluations as (version, name, result), oldest first, without damaged ones."""
        rows = self._read("evaluations", "ORDER BY version", (), [])
        return [(version, name, json.loads(result)) for version, name, result in rows]

    def evaluated(self) -> tuple[int, int]:
        """The number of evaluations, and the newest version among them, 0 if there are none."""
        return self._rows("SELECT COUNT(*), COALESCE(MAX(version), 0) FROM evaluations").fetchone()

    def close(self) -> None:
        """Commit what is left, and close the file."""
        with contextlib.suppress(JournalError):  # the run ends with it
            self.flush()
        self._db.close()

    def __exit__(self, *error: object) -> None:
        self.close()
