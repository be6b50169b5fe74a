"""Durability of the journal."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal, JournalError
from coppice.scheduler.ledger.node_codec import inflated
from coppice.tools.launching.failures import Cause

ROOT = Path(__file__).parent.parent.parent


def small(number: int) -> Tree:
    tree, state = Tree(number, f"task-{number}"), {"question": "q", "steps": [], "done": False}
    root = tree.add(None, "prompt", np.arange(4, dtype=np.int32), "prompt", state=state)
    tree.add(root, "action", np.array([7, 8], np.int32), "act", scores={"reward": 1.0})
    return tree


def add(journal: Journal, number: int, status: str = "growing") -> None:
    """Journal a small tree, which has a group of its number."""
    tree = small(number)
    journal.start_tree(tree, number, 0)
    journal.save_group(tree, number, [])
    if status != "growing":
        journal.close_tree(tree, status)


def journaled(path: Path, trees: int, closed: tuple[int, ...] = ()) -> Journal:
    journal = Journal(path)
    for number in range(trees):
        add(journal, number, "closed" if number in closed else "growing")
    return journal


def test_a_path_may_hold_what_a_uri_does_not_and_a_reason_half_a_surrogate_pair(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "C# a%20b?"
    folder.mkdir()
    journal = journaled(folder / "journal.sqlite", 1)
    journal.close_tree(small(0), "quarantined", "half \ud83d pair")
    journal.close()
    again = Journal(folder / "journal.sqlite", readonly=True, others=[folder / "journal.sqlite"])
    assert {row.reason for row in again.trees()} == {"half ? pair"}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_journal_where_nobody_may_write_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journaled(tmp_path / "j", 2).close()
    (held := sqlite3.connect(tmp_path / "j")).execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert len(Journal(tmp_path / "j", readonly=True).trees()) == 2
    held.close()


def test_a_state_is_stored_as_its_difference_and_comes_back_whole(tmp_path: Path) -> None:
    """Also after a restart, where sequences that were tuples are lists."""
    states: list[Any] = [
        {"q": "x" * 500, "steps": (), "turn": 0, "board": None},
        {"q": "x" * 500, "steps": ({"said": "a" * 500},), "turn": 1, "board": [1, 2]},
        {"q": "x" * 500, "steps": ({"said": "a" * 500}, {"said": "b"}), "turn": True, "board": [2]},
        {"q": "x" * 500, "steps": ({"said": "c"},), "turn": 1, "board": [2]},
        {"other": 1},
    ]
    journal, tree, node = Journal(tmp_path / "journal.sqlite"), Tree(0, "t0"), None
    for number, state in enumerate(states):
        if number == 3:  # the second start
            tree = journal.tree(*journal.trees())
            node = list(tree.nodes.values())[-1]
        node = tree.add(node, "observation", np.zeros(1, np.int32), "", state=state)
        journal.start_tree(tree, 0, 0)
    bodies = journal._rows("SELECT body FROM nodes ORDER BY id")
    sizes = [len(inflated(body)) for (body,) in bodies]
    assert max(sizes[2:]) < 400 < min(sizes[:2])
    back = [msgspec.json.encode(n.state) for n in journal.tree(*journal.trees()).nodes.values()]
    assert back == [*map(msgspec.json.encode, states)]


def test_untrained_trees_are_those_that_grow_or_have_a_group_no_version_holds(
    tmp_path: Path,
) -> None:
    journal = journaled(tmp_path / "j", 3, closed=(1, 2))
    journal.mark_trained(2, 4)
    assert [row.id for row in journal.untrained_trees()] == [0, 1]
    journal.forget_training_after(3)  # the checkpoint that is resumed is older than version 4
    assert [row.id for row in journal.untrained_trees()] == [0, 1, 2]
    assert journal.next_position() == 3


_WRITER = """
import sys
from pathlib import Path
from tests.scheduler.test_journal import Journal, add
journal = Journal(Path(sys.argv[1]))
for number in range(100000):
    add(journal, number, "closed")
    if number >= 10:
        journal.remove(number - 10)
    print(number, flush=True)
"""


def test_after_kill_9_everything_that_was_reported_is_there_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "j")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        reported = [int(writer.stdout.readline()) for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
    journal = Journal(tmp_path / "j")
    rows = journal.trees()
    assert [row.id for row in rows] == list(range(len(rows)))
    assert len(rows) >= len(reported)
    removed = [row.removed for row in rows]
    assert removed == sorted(removed, reverse=True) and sum(removed) >= len(reported) - 10
    for row in rows[:-1]:
        assert (row.status, journal.groups(row.id)) == ("closed", [(row.id, None)])
        assert len(journal.tree(row).nodes) == (0 if row.removed else 2)
    assert journal.damage() == []


def test_a_full_disk_is_a_clear_error_and_what_was_committed_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.start_tree(small(0), 0, 0)
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    # SQLite then reports a full disk, as a real one does
    journal._db.execute(f"PRAGMA max_page_count={pages + 1}")

    def fill() -> None:
        for number in range(1, 1000):
            journal.start_tree(small(number), number, 0)

    with pytest.raises(JournalError, match="free some space"):
        fill()
    rows = Journal(tmp_path / "j", readonly=True).trees()
    assert rows[0].id == 0
    assert [row.id for row in rows] == list(range(len(rows)))


def test_a_lost_version_loses_its_evaluations_and_a_tree_can_be_uprooted(tmp_path: Path) -> None:
    journal = journaled(tmp_path / "j", 2)
    for number in range(2):
        journal.save_evaluation(number, f"v{number}", {"em": 1.0})
    assert journal.evaluated() == (2, 1)
    journal.forget_training_after(0)
    assert [version for version, _, _ in journal.evaluations()] == [0]
    assert journal.evaluated() == (1, 0)
    journal.uproot(1)
    kept = [(len(journal.tree(row).nodes), journal.groups(row.id)) for row in journal.trees()]
    assert kept == [(2, [(0, None)]), (0, [])]


def test_a_sync_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    journal.start_tree(small(0), 0, 0)
    synced, link = list[str](), "/proc/self/fd/{}".format
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(link(file))))
    journal.sync()
    assert synced == [str(tmp_path / "j-wal")]
    journal.close()
    journal.sync()  # SQLite has moved all commits into the file
    assert len(synced) == 1


def test_a_file_that_was_cut_short_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for number in range(50):
        journal.start_tree(small(number), number, 0)
    journal.close()
    os.truncate(path, path.stat().st_size - 5000)
    told = r"sqlite cannot be used \(.*\): .* restore a copy"
    with pytest.raises(JournalError, match=told) as error:
        Journal(path)
    assert not Cause(str(error.value), False).full_disk  # the launcher would say: free some


async def test_a_row_that_sqlite_cannot_hold_is_told_to_whoever_waits(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.start_tree(Tree(0, "a task with half a letter \ud800"), 0, 0)
    with pytest.raises(JournalError, match="mend the task or the plug-in"):
        await journal.written()
    journal.close()


def test_what_a_quarantined_tree_had_given_is_still_to_be_trained(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    add(journal, 0, "quarantined")
    journal.start_tree(small(1), 1, 0)
    journal.close_tree(small(1), "quarantined", "it gave nothing")
    assert [row.id for row in journal.untrained_trees()] == [0]
    journal.mark_trained(0, 1)
    assert journal.untrained_trees() == []


def test_new_trees_take_the_room_of_removed_ones(tmp_path: Path) -> None:
    journal, rng, pages = Journal(tmp_path / "j"), np.random.default_rng(0), list[int]()
    for number in range(100):
        tree = small(number)
        tree.add(tree.nodes[1], "action", rng.integers(2**31, size=4000, dtype=np.int32), "long")
        journal.start_tree(tree, number, 0)
        journal.close_tree(tree)
        if number >= 20:
            journal.remove(number - 20)
        pages.append(journal._number("page_count FROM pragma_page_count"))
    assert max(pages) <= 1.2 * pages[20]
