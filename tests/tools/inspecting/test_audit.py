"""The audit of a run folder finds each broken invariant by name, and none in a whole folder."""

import os
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coppice.actors.environments.base import RejectedTask
from coppice.common import frontier
from coppice.common.shards import Shard, folder
from coppice.scheduler.growth import tasks
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger import journal
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.audit import audit, main
from coppice.wire import digest
from coppice.wire.messages import Turn
from tests.tools.said import Said

UPDATES = 3


def write(run: Path, shards: int) -> Path:
    """A run that ended: three updates, each of two trees of two groups from each scheduler."""
    trained: dict[int, int] = {}
    for number in range(shards):
        shard, home = Shard(number, shards), folder(run, number)
        home.mkdir(parents=True, exist_ok=True)
        book, identity, group = Journal(home / "journal.sqlite"), -1, -1
        questions, origin = home / "train.jsonl", {"seed": ("7", "7"), "verbatim": ("False",) * 2}
        lines = [f'{{"question": "q{i}", "golden_answers": ["a"]}}\n' for i in range(9)]
        questions.write_text("".join(lines))
        book.begin(origin | {"data.train[0]": (str(questions), digest.file(questions))})
        drawn = tasks.Tasks(str(questions), 7)
        for draw in range(2 * UPDATES):
            identity, version = shard.after(identity), draw // 2
            tree = Tree(identity, f"task-{identity}")
            root = tree.add(None, "prompt", np.arange(4, dtype=np.int32), "prompt", state={})
            place = shard.position(draw)
            book.start_tree(tree, place, version, drawn.at(place).digest)
            for _ in range(2):
                group = shard.after(group)
                action = tree.add(root, "action", np.array([7, 8], np.int32), "act")
                action.logprobs = np.full(2, -0.5, np.float32)
                action.versions = np.full(2, version, np.int32)
                tree.changed[action.id] = action
                book.save_group(tree, group, [Turn(action.id, 0, 1, {})])
                book.mark_trained(group, version + 1)
                trained[group] = version + 1
            book.close_tree(tree)
        book.close()
        records = [{"version": v + 1, "learner/groups": 4.0 * shards} for v in range(UPDATES)]
        lines = [msgspec.json.encode(record) + b"\n" for record in records]
        (home / "metrics.jsonl").write_bytes(b"".join(lines))
        (home / "summary.json").write_text("{}")
    settings = {"scheduler": {"max_staleness": 0, "shards": shards}}
    (run / "config.json").write_bytes(msgspec.json.encode(settings))
    state = run / "checkpoints" / f"v{UPDATES:06}"
    state.mkdir(parents=True)
    known = frontier.Frontier(UPDATES, frontier.runs(dict(sorted(trained.items()))))
    (state / frontier.FILE).write_bytes(msgspec.json.encode(known))
    digest.write_sums(state, {frontier.FILE: digest.file(state / frontier.FILE)})
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path, 1)


def execute(home: Path, statement: str) -> None:
    """Execute a statement as a scheduler with a fault would: the rows' checksums are right."""
    with sqlite3.connect(home / "journal.sqlite") as file:
        file.execute(statement)
        for table in ("trees", "groups"):
            columns = ", ".join(journal._FIXED[table])
            rows = file.execute(f"SELECT {columns} FROM {table}").fetchall()
            sums = [(journal._summed(*row)[-1], row[0]) for row in rows]
            file.executemany(f"UPDATE {table} SET sum=? WHERE id=?", sums)
    file.close()


def rules(run: Path) -> set[str]:
    return {violation.rule for violation in audit(run)}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_whole_run_passes(tmp_path: Path, shards: int, said: Said) -> None:
    run = write(tmp_path, shards)
    assert audit(run) == []
    assert "every invariant holds" in said(main, run)
    assert main([str(run / "checkpoints")]) == 2


@pytest.mark.parametrize(
    ("shards", "statement", "rule"),
    [
        (1, "UPDATE trees SET position=2 WHERE id=3", "drawn once"),
        (1, "UPDATE trees SET status='quarantined' WHERE id=3", "quarantined with a reason"),
        (1, "UPDATE trees SET status='growing' WHERE id=3", "nothing in flight at the end"),
        (1, "UPDATE trees SET status='growing' WHERE id=3", "trained after it closed"),
        (1, "UPDATE groups SET trained=3 WHERE id=5", "a tree in one update"),
        (1, "UPDATE groups SET trained=3 WHERE id=5", "journal and checkpoint agree"),
        (1, "UPDATE groups SET trained=3 WHERE id=5", "journal and learner agree"),
        (1, "DELETE FROM groups WHERE id=5", "journal and checkpoint agree"),
        (1, "UPDATE groups SET trained=3 WHERE tree=0", "within the staleness bound"),
        (1, "UPDATE groups SET trained=1 WHERE tree=5", "within the staleness bound"),
        (1, "DELETE FROM nodes WHERE tree=4 AND id=2", "well-formed trees"),
        (1, "UPDATE trees SET digest='another' WHERE id=4", "the task that was drawn"),
        (2, "DELETE FROM groups WHERE id=3", "journal and checkpoint agree"),
        # the other's of the two
        (2, "UPDATE trees SET position=position+1-2*(position%2) WHERE id=7", "drawn once"),
        (2, "UPDATE trees SET id=8 WHERE id=7", "ids of one shard"),
    ],
)
def test_a_fault_in_the_last_journal_is_found(
    tmp_path: Path, shards: int, statement: str, rule: str
) -> None:
    execute(folder(write(tmp_path, shards), shards - 1), statement)
    assert rule in rules(tmp_path)
    assert main([str(tmp_path)]) == 1


def test_a_removed_tree_is_counted_and_must_have_been_trained(run: Path, said: Said) -> None:
    book = Journal(run / "journal.sqlite")
    for tree in book.finished(1):
        book.remove(tree)
    book.close()
    told = said(main, run)
    assert "2 trees were removed by retention" in told and "every invariant holds" in told
    execute(run, "UPDATE groups SET trained=NULL WHERE id=0")
    assert "removed after training" in rules(run)


def test_faults_in_the_records_are_found(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    assert rules(run) == {"one record per update"}
    path.write_bytes(b"".join(lines).replace(b"4.0", b"3.0", 1))
    assert rules(run) == {"journal and learner agree"}
    path.write_bytes(b"".join(lines)[:-9])
    assert "records are whole" in rules(run)


def test_a_scheduler_may_lack_the_newest_record_until_all_have_ended(tmp_path: Path) -> None:
    home = folder(write(tmp_path, 2), 1)
    lines = (home / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (home / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    assert rules(tmp_path) == {"one record per update"}
    (home / "summary.json").unlink()
    assert audit(tmp_path) == []


def test_a_crash_may_leave_the_newest_update_unfinished_and_the_end_may_not(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b'{"version": 3, "lear')
    execute(run, "UPDATE groups SET trained=NULL WHERE id=11")
    assert rules(run)
    (run / "summary.json").unlink()
    assert audit(run) == []


def test_a_changed_checkpoint_and_one_without_digests_are_found(run: Path) -> None:
    folder = run / "checkpoints" / "v000003"
    state = (folder / frontier.FILE).read_bytes()
    (folder / frontier.FILE).write_bytes(state.replace(b"[8,11,3]", b"[8,10,3]"))
    assert rules(run) == {"checkpoints are whole", "journal and checkpoint agree"}
    (folder / frontier.FILE).write_bytes(state)
    (folder / digest.SUMS).unlink()
    assert rules(run) == {"checkpoints are whole"}


def test_the_bound_is_the_largest_that_the_run_had_when_a_resume_changed_it(run: Path) -> None:
    execute(run, "UPDATE groups SET trained=3 WHERE tree=0")
    assert "within the staleness bound" in rules(run)
    (run / "config-1.json").write_text('{"scheduler": {"max_staleness": 2}}')
    assert "within the staleness bound" not in rules(run)


COLUMNS = [(table, name) for table, names in journal._FIXED.items() for name in names]


@pytest.mark.parametrize(("table", "column"), [*COLUMNS, ("trees", "status")])
def test_a_flipped_byte_in_any_row_is_named(run: Path, table: str, column: str) -> None:
    book = Journal(run / "journal.sqlite")
    book.reject([RejectedTask("train.jsonl:3", "no question")])
    book.save_evaluation(0, "start", {"em": 1.0})
    book.picture(b"png")
    book.close()
    with sqlite3.connect(run / "journal.sqlite") as file:
        key = journal._FIXED[table][0]
        query = f"SELECT {column} FROM {table} ORDER BY {key} DESC LIMIT 1"
        ((old,),) = file.execute(query)
        new, value = None, "?"
        if isinstance(old, int | float):
            new = old + 64
        else:  # with a byte that is no UTF-8
            new = b"\xff" + (old if isinstance(old, bytes) else old.encode())[1:]
            value = f"CAST(? AS {'TEXT' if isinstance(old, str) else 'BLOB'})"
        file.execute(f"UPDATE {table} SET {column}={value} WHERE {column}=?", (new, old))
    file.close()
    named = [one.what for one in audit(run) if one.rule == "journals are whole"]
    assert any(f" of {table}" in what for what in named) and main([str(run)]) == 1


def test_a_cut_journal_and_a_torn_config_are_named(run: Path) -> None:
    for name in ("config.json", "config-1.json"):
        (run / name).write_bytes(b'{"scheduler": {"max_st')
    assert [one.what[:14] for one in audit(run)] == ["config-1.json:", "config.json: I"]
    for size in (30_000, 5000, 50):
        os.truncate(run / "journal.sqlite", size)
        assert rules(run) == {"configs are whole", "journals are whole"}
    assert main([str(run)]) == 1
