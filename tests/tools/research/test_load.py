"""What holds for 10,000 trees is counted here with 200, in real processes."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from coppice.common import frontier
from coppice.research.benches import load
from coppice.research.benches.load import LoadPlan
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.audit import audit

pytestmark = pytest.mark.slow

TREES, QUESTIONS, UPDATES, JUDGES = 200, 50, 6, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: eight judges that stay one second, and a learner that takes its time."""
    folder = tmp_path_factory.mktemp("load")
    timing = DispatchConfig(heartbeat_s=0.2, dead_after_s=3.0)
    plan = LoadPlan(QUESTIONS, 0.5, JUDGES, 1.0)
    load.prepare(folder, TREES, 3, QUESTIONS, UPDATES, plan, timing)
    load.measure(folder, 0.2)
    return folder


def test_every_tree_is_trained_once_though_judges_come_and_go(run: Path) -> None:
    journal = Journal(run / "journal.sqlite", readonly=True)
    trees = journal.trees()
    assert [tree.status for tree in trees] == ["closed"] * (UPDATES * QUESTIONS)
    groups = {group: version for tree in trees for group, version in journal.groups(tree.id)}
    assert groups == frontier.read(run, UPDATES).groups()  # the learner's own record
    assert not audit(run)
    joined = (run / "scheduler.log").read_text().count("judge.fast'], capacity")
    assert joined > JUDGES // 2, "no place of a fast judge was filled a second time"


def test_a_slow_learner_holds_up_admission_and_nothing_is_left_open(run: Path) -> None:
    trees = Journal(run / "journal.sqlite", readonly=True).trees()
    admitted_at = Counter(tree.version for tree in trees)
    assert admitted_at[0] == TREES
    for version in range(UPDATES):
        assert sum(admitted_at[v] for v in range(version + 1)) <= TREES + version * QUESTIONS
    lines = [msgspec.json.decode(line) for line in (run / "load.jsonl").read_bytes().splitlines()]
    assert max(line["trees"] for line in lines) == TREES
    assert (lines[-1]["open"], lines[-1]["nodes"], lines[-1]["workers"]) == ({}, 0, 0)
