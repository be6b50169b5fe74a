"""A whole run of the real processes in the shop: the oracle judges every turn, GiGPO trains on the
environment's rewards."""

import json
import subprocess
import sys
from pathlib import Path

from coppice.scheduler.ledger.journal import Journal
from tests import tiny
from tests.e2e.test_run import ROOT, finish, launch, left_over

UPDATES, TREES, GROUP = 2, 2, 3

CONFIG = """
name = "shop"
[model]
name = "{model}"
[data]
environment = "tests.shop:AnyText"
[data.options]
history = 1
horizon = 6
[warm_start]
steps = 0
[scheduler]
strategy = "full"
strategy_options = {{ k = {group} }}
judge = "webshop"
max_action_tokens = 3
updates = {updates}
questions_per_update = {trees}
[scheduler.evaluation]
questions = 4
[actors]
count = 1
dtype = "float32"
kv_cache_gib = 0.1
max_context = 8192
[judges.use.webshop]
[learner]
count = 1
scheme = "gigpo"
scheme_options = {{ column = "step_reward" }}
lr = 1e-3
kl_coef = 0.0
dtype = "float32"
lora = {{ rank = 4, alpha = 8.0 }}
"""


def test_a_run_in_the_shop_trains_on_its_rewards_and_shows_its_pages(tmp_path: Path) -> None:
    tiny.save(tmp_path / "model", max_position_embeddings=16384)
    config, run = tmp_path / "shop.toml", tmp_path / "run"
    config.write_text(
        CONFIG.format(model=tmp_path / "model", updates=UPDATES, trees=TREES, group=GROUP)
    )
    process = launch(config, run)
    out = finish(process)
    assert process.returncode == 0, out
    journal = Journal(run / "journal.sqlite", readonly=True)
    turns = [
        turn
        for tree in journal.trees("split='train'")
        for group, _ in journal.groups(tree.id)
        for turn in journal.turns(group)
    ]
    assert len({turn.trajectory for turn in turns}) == GROUP
    assert {turn.scores["reward"] for turn in turns} >= {0.0, 1.0}
    assert {turn.scores["step_reward"] for turn in turns} <= {0.0, 10.0}
    ends = [turn for turn in turns if "outcome" in turn.scores]
    assert len(ends) == UPDATES * TREES * GROUP
    assert all(
        turn.scores["success"] in (0.0, 1.0) and 0 <= turn.scores["score"] <= 100 for turn in ends
    )
    anchors = [(turn.anchor) for turn in turns]
    assert None not in anchors
    # situations recur: the search page begins every trajectory
    assert len(set(anchors)) < len(anchors)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout"]["end"]["questions"] == 4
    assert {"success", "score", "oracle", "valid"} <= set(summary["heldout"]["end"]["measures"])
    assert not left_over(run)
    dump = [
        sys.executable,
        "-c",
        "import sys; from coppice.tools.inspecting.dump import main; sys.exit(main())",
        str(run),
        "--full",
    ]
    shown = subprocess.run(dump, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "Back to Search" in shown
    assert "Find me" in shown
    assert "The purchase is rewarded with" in shown or "The actions are used up" in shown
