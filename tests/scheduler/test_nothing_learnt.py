"""A run in which nothing is learnt says so, with the cause and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from coppice.scheduler.growth.tasks import Tasks
from coppice.scheduler.telemetry.alerts import UPDATES, Fruitless
from tests.updates import batch, episodes, rescored, trainer


def test_equal_rewards_are_told_after_some_updates(tmp_path: Path, llama: Path) -> None:
    made, fruitless = trainer(llama, tmp_path), Fruitless("reward")
    equal = {"reward": 1.0, "valid": 1.0}
    batches = (rescored(batch(0, version), lambda _: equal) for version in range(UPDATES))
    *before, (line,) = [fruitless.note(made.update(each)) for each in batches]
    assert before == [[]] * (UPDATES - 1)
    assert f": every advantage was 0 in the last {UPDATES} updates" in line


def test_a_column_that_turns_lack_is_told_at_once(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path, scheme="grpo", scheme_options={"column": "process"})
    (line,) = Fruitless("process").note(made.update(episodes(4, 0)))
    assert "left out every trajectory" in line and "'process'" in line


EVIDENCE = [{"title": "Peru", "field": "Capital", "value": "Lima"}]


@pytest.mark.parametrize("evidence", [[], EVIDENCE])
def test_questions_without_evidence_are_told_at_once(tmp_path: Path, evidence: list[Any]) -> None:
    row = {"id": "1", "question": "?", "golden_answers": ["Lima"], "evidence": evidence}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    tasks = Tasks(str(tmp_path / "own.jsonl"), 0)
    assert tasks.evidence == bool(evidence)
    lines = Fruitless("reward", not tasks.evidence).note({})
    assert ["query = 'format'" in line for line in lines] == [True] * (not evidence)


def test_states_in_which_every_action_loses_are_told() -> None:
    fruitless, share = Fruitless("reward"), {"learner/lowered_states_share": 0.2}
    *before, (line,) = [fruitless.note(share) for _ in range(UPDATES)]
    assert before == [[]] * (UPDATES - 1) and "so unreadable text" in line


def test_a_condition_must_hold_in_updates_that_follow_each_other() -> None:
    fruitless = Fruitless("reward")
    shares = [1.0] * (UPDATES - 1) + [0.5] + [1.0] * UPDATES
    lines = [len(fruitless.note({"learner/zero_advantage_share": share})) for share in shares]
    assert lines == [0] * (len(shares) - 1) + [1]
