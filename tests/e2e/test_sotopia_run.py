"""Whole runs of the real processes in conversations: the policy talks to itself, or to a frozen
copy that the run serves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.scheduler.ledger.journal import Journal
from tests import tiny
from tests.conversations import WORDS
from tests.e2e.test_run import (
    ROOT,
    check_groups,
    finish,
    kill_everything,
    launch,
    left_over,
    wait_for_update,
)

UPDATES, TREES, GROUP = 2, 2, 3

CONFIG = """
name = "talk"
[model]
name = "{model}"
[data]
environment = "tests.conversations:AnyWords"
[data.options]
turns = 6
partner = "{partner}"
partner_tokens = 3
[warm_start]
steps = 0
[scheduler]
strategy = "full"
strategy_options = {{ k = {group} }}
judge = "none"
max_action_tokens = 3
updates = {updates}
questions_per_update = {trees}
[scheduler.evaluation]
questions = 4
[actors]
count = 1
dtype = "float32"
kv_cache_gib = 0.1
max_context = 4096
[judges.use.sotopia_rules]
{more}
[learner]
count = 1
scheme = "oprl"
scheme_options = {{ base = "grpo", invalid_penalty = 0.0 }}
lr = 1e-3
kl_coef = 0.0
dtype = "float32"
lora = {{ rank = 4, alpha = 8.0 }}
[learner.prm]
threshold = 0.6
lr = 1e-3
"""
FROZEN = """
[judges.use.frozen]
endpoint = { url = "served", max_tokens = 64 }
[judges.model]
name = "policy"
kv_cache_gib = 0.1
"""


def configured(folder: Path, partner: str) -> Path:
    tiny.save(folder / "model", max_position_embeddings=8192)
    more = FROZEN if partner == "frozen" else ""
    path = folder / "talk.toml"
    path.write_text(
        CONFIG.format(
            model=folder / "model",
            updates=UPDATES,
            trees=TREES,
            group=GROUP,
            partner=partner,
            more=more,
        )
    )
    return path


def check_conversations(run: Path) -> None:
    """Every tree closed and trained once; the goal on each last turn; the dump shows both speakers."""
    check_groups(run, UPDATES, TREES)
    journal = Journal(run / "journal.sqlite", readonly=True)
    for row in journal.trees("split='train'"):
        tree = journal.tree(row)
        ((group, _),) = journal.groups(row.id)
        turns = journal.turns(group)
        # six turns are three of the trained side, whichever side it is
        assert len(turns) == 3 * GROUP
        assert all(tree.nodes[turn.node].kind == "action" for turn in turns)
        assert [turn.scores.get("goal") in (0, 10) for turn in turns] == [
            False,
            False,
            True,
        ] * GROUP
        answers = [node.text for node in tree.nodes.values() if node.kind == "observation"]
        assert len(answers) == len(turns)
        assert any(f'said: "{words}"' in answer for words in WORDS for answer in answers)
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; from coppice.tools.inspecting.dump import main; sys.exit(main())", str(run), "--full"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (
        "said:" in shown
        and "The conversation is over." in " ".join(shown.split())
        and "goal" in shown
    )
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["heldout"]["end"]["measures"]["goal"]["mean"] <= 10
    assert summary["quarantined"] == []
    assert not left_over(run)


@pytest.mark.parametrize("partner", ["policy", "frozen"])
def test_conversations_are_trained_by_oprl_to_the_end(tmp_path: Path, partner: str) -> None:
    run = tmp_path / "run"
    process = launch(configured(tmp_path, partner), run)
    out = finish(process)
    assert process.returncode == 0, out
    check_conversations(run)
    counts = json.loads((run / "summary.json").read_text())["counts"]
    assert counts["spoken_replies"] >= 2 * GROUP * UPDATES * TREES


def test_conversations_go_on_after_kill_9_of_everything(tmp_path: Path) -> None:
    config, run = configured(tmp_path, "policy"), tmp_path / "run"
    process = launch(config, run)
    wait_for_update(run, process)
    kill_everything(run, process)
    process = launch(config, run, "--resume", str(run))
    out = finish(process)
    assert process.returncode == 0, out
    check_conversations(run)
