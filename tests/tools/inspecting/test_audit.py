"""The audit of a run folder finds each broken invariant by name, and none in a whole folder."""

import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coppice.common import frontier
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.audit import audit, main
from coppice.wire import digest
from coppice.wire.messages import Turn

TREES, QUESTIONS = 6, 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that ended: three updates of two trees, each with two groups."""
    journal, groups = Journal(tmp_path / "journal.sqlite"), dict[int, int]()
    for number in range(TREES):
        version = number // QUESTIONS
        tree = Tree(number, f"task-{number}")
        root = tree.add(None, "prompt", np.arange(4, dtype=np.int32), "prompt", state={})
        for group in (2 * number, 2 * number + 1):
            values = {
                "logprobs": np.full(2, -0.5, np.float32),
                "versions": np.full(2, version, np.int32),
            }
            action = tree.add(root, "action", np.array([7, 8], np.int32), "act", **values)
            tree.changed[action.id] = action
            if not group % 2:
                journal.start_tree(tree, number, version)
            journal.save_group(tree, group, [Turn(action.id, 0, 1, {})])
            journal.mark_trained(group, version + 1)
            groups[group] = version + 1
        journal.close_tree(tree)
    journal.close()
    records = [{"version": v, "learner/groups": 2.0 * QUESTIONS} for v in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(msgspec.json.encode(r) + b"\n" for r in records)
    )
    (tmp_path / "config.json").write_text('{"scheduler": {"max_staleness": 0}}')
    (tmp_path / "summary.json").write_text("{}")
    folder = tmp_path / "checkpoints" / "v000003"
    folder.mkdir(parents=True)
    (folder / frontier.FILE).write_bytes(
        msgspec.json.encode(frontier.Frontier(3, frontier.runs(groups)))
    )
    digest.write_sums(folder, {frontier.FILE: digest.file(folder / frontier.FILE)})
    return tmp_path


def rules(run: Path) -> set[str]:
    return {violation.rule for violation in audit(run)}


def test_a_whole_run_passes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(run) == []
    assert main([str(run)]) == 0
    assert "every invariant holds" in capsys.readouterr().out
    assert main([str(run / "checkpoints")]) == 2


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE trees SET position=9 WHERE id=3", "drawn once"),
        ("UPDATE trees SET position=2 WHERE id=3", "drawn once"),
        ("UPDATE trees SET status='quarantined' WHERE id=3", "quarantined with a reason"),
        ("UPDATE trees SET status='growing' WHERE id=3", "nothing in flight at the end"),
        ("UPDATE trees SET status='growing' WHERE id=3", "trained after it closed"),
        ("UPDATE groups SET trained=NULL WHERE id=5", "nothing in flight at the end"),
        ("UPDATE groups SET trained=3 WHERE id=5", "a tree in one update"),
        ("UPDATE groups SET trained=3 WHERE id=5", "journal and checkpoint agree"),
        ("UPDATE groups SET trained=3 WHERE id=5", "journal and learner agree"),
        ("DELETE FROM groups WHERE id=5", "journal and checkpoint agree"),
        ("UPDATE groups SET trained=3 WHERE tree=0", "within the staleness bound"),
        ("UPDATE groups SET trained=1 WHERE tree=5", "within the staleness bound"),
        ("DELETE FROM nodes WHERE tree=4 AND id=0", "well-formed trees"),
        ("DELETE FROM nodes WHERE tree=4 AND id=2", "well-formed trees"),
    ],
)
def test_a_fault_in_the_journal_is_found(run: Path, statement: str, rule: str) -> None:
    with sqlite3.connect(run / "journal.sqlite") as journal:
        journal.execute(statement)
    journal.close()
    assert rule in rules(run)
    assert main([str(run)]) == 1


def test_faults_in_the_records_are_found(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    assert rules(run) == {"one record per update"}
    path.write_bytes(b"".join([*lines, lines[1]]))
    assert rules(run) == {"one record per update"}
    path.write_bytes(b"".join(lines).replace(b"4.0", b"3.0", 1))
    assert rules(run) == {"journal and learner agree"}
    path.write_bytes(b"".join(lines)[:-9])
    assert "records are whole" in rules(run)


def test_a_crash_may_leave_the_newest_update_unfinished_and_the_end_may_not(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(
        b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b'{"version": 3, "lear'
    )
    with sqlite3.connect(run / "journal.sqlite") as journal:
        journal.execute("UPDATE groups SET trained=NULL WHERE id=11")
    journal.close()
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
    with sqlite3.connect(run / "journal.sqlite") as journal:
        journal.execute("UPDATE groups SET trained=3 WHERE tree=0")
    journal.close()
    assert "within the staleness bound" in rules(run)
    (run / "config-1.json").write_text('{"scheduler": {"max_staleness": 2}}')
    assert "within the staleness bound" not in rules(run)
