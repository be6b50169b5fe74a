"""Whole runs of the real processes on a game: chains against two opponents, and Monte Carlo values
through kill -9 of everything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.common import frontier
from coppice.scheduler.ledger.journal import Journal
from coppice.wire.messages import Turn
from tests import tiny
from tests.e2e.test_run import (
    ROOT,
    finish,
    kill_everything,
    launch,
    left_over,
    undeclared,
    wait_for_update,
)

UPDATES, TREES = 3, 4

CONFIG = """
name = "games"
[model]
name = "{model}"
[data]
environment = "tests.games:AnyText"
[data.options]
prompt = "tictactoe_compact"
opponents = {{ tictactoe_minimax = 0.5, random = 0.5 }}
[warm_start]
steps = 0
[scheduler]
judge = "tictactoe"
max_action_tokens = 3
updates = {updates}
questions_per_update = {trees}
max_staleness = 1
[scheduler.evaluation]
questions = 6
options = {{ opponents = {{ random = 1.0 }} }}
[actors]
count = 1
dtype = "float32"
kv_cache_gib = 0.01
max_context = 96
[judges.use.tictactoe]
kind = "minimax"
[judges.use.tictactoe_minimax]
[learner]
count = 1
lr = 1e-3
kl_coef = 0.0
dtype = "float32"
lora = {{ rank = 4, alpha = 8.0 }}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config over a tiny model."""
    folder = tmp_path_factory.mktemp("games")
    tiny.save(folder / "model")
    path = folder / "games.toml"
    path.write_text(CONFIG.format(model=folder / "model", updates=UPDATES, trees=TREES))
    return path


def episodes(run: Path) -> list[list[Turn]]:
    """The turns of every training tree, after a check: each draw once, every tree closed with
    exactly one group, trained once."""
    journal = Journal(run / "journal.sqlite", readonly=True)
    trees = journal.trees("split='train'")
    assert [tree.position for tree in trees] == list(range(UPDATES * TREES))
    assert {tree.status for tree in trees} == {"closed"}
    groups = [journal.groups(tree.id) for tree in trees]
    assert [len(of_tree) for of_tree in groups] == [1] * len(trees)
    versions = [version for ((_, version),) in groups]
    assert sorted(versions, key=lambda version: version or 0) == [
        v for v in range(1, UPDATES + 1) for _ in range(TREES)
    ]
    assert frontier.read(run, UPDATES).groups() == dict(pair for (pair,) in groups)
    made = [journal.turns(group) for ((group, _),) in groups]
    for tree, turns in zip(trees, made, strict=True):
        actions = [node.id for node in journal.tree(tree).nodes.values() if node.kind == "action"]
        assert [turn.node for turn in turns] == actions  # nothing was sampled that is not trained
        assert [turn.turn for turn in turns] == list(range(1, len(turns) + 1))
    return made


def check_columns(made: list[list[Turn]]) -> None:
    """Rewards of the oracle on every turn, the outcome on the last; games of several turns."""
    assert max(map(len, made)) >= 3
    for turns in made:
        assert all(turn.scores["valid"] == 1 and turn.scores["reward"] in (0, 1) for turn in turns)
        assert [turn.scores["outcome"] for turn in turns if "outcome" in turn.scores] == [
            turns[-1].scores["outcome"]
        ]
        assert turns[-1].scores["outcome"] in (-1, 0, 1)


def test_chains_against_two_opponents_train_to_the_end(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(
        config, run, "--set", "scheduler.strategy=chain", "--set", "learner.scheme=turn_grpo"
    )
    out = finish(process)
    assert process.returncode == 0, out
    made = episodes(run)
    check_columns(made)
    assert len({turn.scores["reward"] for turns in made for turn in turns}) == 2
    journal = Journal(run / "journal.sqlite", readonly=True)
    opponents = {
        journal.tree(tree).nodes[0].state["opponent"] for tree in journal.trees("split='train'")
    }
    assert opponents == {"tictactoe_minimax", "random"}
    examined = {
        journal.tree(tree).nodes[0].state["opponent"] for tree in journal.trees("split='heldout'")
    }
    assert examined == {"random"}
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["baselines"]) == {"random_legal_move", "first_legal_move"}
    assert all(-1 <= value <= 1 for value in summary["baselines"].values())
    assert summary["heldout"]["end"]["version"] == UPDATES
    assert summary["heldout"]["end"]["questions"] == 6
    assert summary["heldout"]["end"]["measures"]["valid"]["mean"] == 1
    assert summary["counts"]["environment_steps"] == sum(map(len, made))
    assert summary["quarantined"] == []
    assert undeclared(run) == []
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "learner/grad_norm" in record]
    assert len(trained) == UPDATES
    assert trained[0]["learner/logprob_gap_max"] < 1e-3
    assert all(
        record["learner/forwarded_tokens"] < record["learner/path_tokens"] for record in trained
    )
    assert not left_over(run)
    dump = [
        sys.executable,
        "-c",
        "import sys; from coppice.tools.inspecting.dump import main; sys.exit(main())",
        str(run),
    ]
    shown = subprocess.run(dump, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    last, unwrapped = made[-1], " ".join(shown.split())
    assert unwrapped.count("* action") == len(last)
    assert f"(version {UPDATES})" in unwrapped
    assert f"outcome {last[-1].scores['outcome']:+.3f}" in unwrapped


def test_monte_carlo_values_survive_kill_9_of_the_whole_group(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [
        "scheduler.strategy=mc_value",
        "learner.scheme=mc_pr",
        "scheduler.strategy_options={continuations=3}",
    ]
    settings += ["scheduler.evaluation.questions=0"]
    process = launch(config, run, *(part for setting in settings for part in ("--set", setting)))
    wait_for_update(run, process)
    kill_everything(run, process)
    assert not (run / "summary.json").exists()
    process = launch(config, run, "--resume", str(run))
    out = finish(process)
    assert process.returncode == 0, out
    made = episodes(run)
    check_columns(made)
    for turns in made:
        values = [turn.scores["mc_value"] for turn in turns]
        # means of three outcomes
        assert all(round(3 * value, 6) in range(-3, 4) for value in values)
        assert "outcome" in turns[-1].scores
    assert len({turn.scores["mc_value"] for turns in made for turn in turns}) > 2
    assert json.loads((run / "summary.json").read_text())["counts"]["continuation_steps"] > 0
    assert not left_over(run)
