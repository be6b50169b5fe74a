"""The audit of a run of two schedulers: all journals together hold what the learner trained, and
each only what is its own."""

import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coppice.common import frontier
from coppice.common.shards import Shard, folder
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.audit import audit
from coppice.wire import digest
from coppice.wire.messages import Turn

SHARDS, TREES, UPDATES = 2, 4, 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two updates of four trees of one group, half of them of each scheduler."""
    trained: dict[int, int] = {}
    for number in range(SHARDS):
        shard, home = Shard(number, SHARDS), folder(tmp_path, number)
        home.mkdir(parents=True, exist_ok=True)
        journal, identity = Journal(home / "journal.sqlite"), -1
        for draw in range(TREES):
            identity, version = shard.after(identity), draw // (TREES // UPDATES)
            tree = Tree(identity, f"task-{identity}")
            root = tree.add(None, "prompt", np.arange(4, dtype=np.int32), "prompt", state={})
            values = {
                "logprobs": np.full(2, -0.5, np.float32),
                "versions": np.full(2, version, np.int32),
            }
            action = tree.add(root, "action", np.array([7, 8], np.int32), "act", **values)
            journal.start_tree(tree, shard.position(draw), version)
            journal.save_group(tree, identity, [Turn(action.id, 0, 1, {})])
            journal.mark_trained(identity, version + 1)
            journal.close_tree(tree)
            trained[identity] = version + 1
        journal.close()
        records = [{"version": v, "learner/groups": 4.0} for v in (1, 2)]
        (home / "metrics.jsonl").write_bytes(
            b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        )
        (home / "summary.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"scheduler": {"max_staleness": 0, "shards": 2}}')
    state = tmp_path / "checkpoints" / "v000002"
    state.mkdir(parents=True)
    (state / frontier.FILE).write_bytes(
        msgspec.json.encode(frontier.Frontier(2, frontier.runs(trained)))
    )
    digest.write_sums(state, {frontier.FILE: digest.file(state / frontier.FILE)})
    return tmp_path


def rules(run: Path) -> set[str]:
    return {violation.rule for violation in audit(run)}


def test_a_whole_run_of_two_schedulers_passes(run: Path) -> None:
    assert audit(run) == []


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE groups SET trained=NULL WHERE id=3", "nothing in flight at the end"),
        ("DELETE FROM groups WHERE id=3", "journal and checkpoint agree"),
        ("UPDATE groups SET trained=2 WHERE id=1", "journal and learner agree"),
        ("UPDATE trees SET position=position+2 WHERE id=7", "drawn once"),
        # the other's of the two
        ("UPDATE trees SET position=position+1-2*(position%2) WHERE id=7", "drawn once"),
        ("UPDATE trees SET id=8 WHERE id=7", "ids of one shard"),
    ],
)
def test_a_fault_in_the_second_journal_is_found(run: Path, statement: str, rule: str) -> None:
    with sqlite3.connect(folder(run, 1) / "journal.sqlite") as journal:
        journal.execute(statement)
    journal.close()
    assert rule in rules(run)


def test_a_scheduler_without_the_record_of_an_update_is_found_when_both_have_ended(
    run: Path,
) -> None:
    path = folder(run, 1) / "metrics.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert rules(run) == {"one record per update"}
    (folder(run, 1) / "summary.json").unlink()
    assert audit(run) == []
