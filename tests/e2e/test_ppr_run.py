"""PPR whole: rounds of search judged by a language model that the run serves itself, held to its
form; PPO with a critic; kill -9."""

import json
from pathlib import Path

import pytest

from coppice.scheduler.ledger.journal import Journal
from coppice.wire.messages import Turn
from tests.e2e.test_run import (
    finish,
    kill_everything,
    launch,
    left_over,
    prepare,
    undeclared,
    wait_for_update,
)

UPDATES, QUESTIONS = 3, 4

CONFIG = """
name = "ppr"
[model]
name = "{folder}/model"
[data]
train = "{folder}/tasks.jsonl"
heldout = "{folder}/tasks.jsonl"
corpus = "{folder}/corpus.jsonl"
environment = "tests.search:AnySearch"
[data.options]
prompt = "question"
topk = 1
[warm_start]
steps = 0
[scheduler]
strategy = "ppr"
judge = "pprm"
budget = 4
max_action_tokens = 8
updates = {updates}
questions_per_update = {questions}
max_staleness = 1
[scheduler.evaluation]
questions = 2
[actors]
count = 1
dtype = "float32"
max_context = 1024
kv_cache_gib = 0.01
[judges.use.exact_match]
[judges.use.pprm]
endpoint = {{ url = "served", max_tokens = 80 }}
templates = {{ system = "{folder}/system.txt", user = "{folder}/user.txt" }}
[judges.model]
name = "{folder}/model"
max_context = 1024
kv_cache_gib = 0.02
[learner]
count = 1
scheme = "ppr"
scheme_options = {{ kl_coef = 0.001 }}
aggregation = "token"
kl_coef = 0.0
lr = 1e-3
dtype = "float32"
lora = {{ rank = 4, alpha = 8.0 }}
[learner.critic]
lr = 1e-3
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config over a tiny model that is policy and judge; prompts of a few bytes, since each is a
    token."""
    folder = tmp_path_factory.mktemp("ppr")
    prepare(folder)
    (folder / "system.txt").write_text("Grade.")
    (folder / "user.txt").write_text("{query_str}\n{solution_str}")
    path = folder / "ppr.toml"
    path.write_text(CONFIG.format(folder=folder, updates=UPDATES, questions=QUESTIONS))
    return path


def groups(run: Path) -> list[list[Turn]]:
    """The turns of every training tree, after a check: one group a tree, trained once."""
    journal = Journal(run / "journal.sqlite", readonly=True)
    trees = journal.trees("split='train'")
    assert [tree.position for tree in trees] == list(range(UPDATES * QUESTIONS))
    found = [journal.groups(tree.id) for tree in trees]
    assert [len(of_tree) for of_tree in found] == [1] * len(trees)
    assert sorted(version or 0 for ((_, version),) in found) == [
        v for v in range(1, UPDATES + 1) for _ in range(QUESTIONS)
    ]
    return [journal.turns(group) for ((group, _),) in found]


def test_every_turn_but_the_last_has_a_valid_process_reward_and_the_critic_learns_through_kill_9(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = launch(config, run)
    wait_for_update(run, process)
    kill_everything(run, process)
    process = launch(config, run, "--resume", str(run))
    out = finish(process)
    assert process.returncode == 0, out
    journal = Journal(run / "journal.sqlite", readonly=True)
    for tree in journal.trees("split='train'"):
        nodes = journal.tree(tree).nodes.values()
        found = [node.text for node in nodes if node.kind == "observation"]
        assert len(found) == 2
        assert all(text.startswith("\n<information>Doc 1(Title: ") for text in found)
    for turns in groups(run):
        assert len(turns) == 3, "two rounds of search, then an answer"
        assert all(
            turn.scores["judge_valid"] == 1 and 0 <= turn.scores["process"] <= 1
            for turn in turns[:-1]
        )
        assert "process" not in turns[-1].scores
        assert turns[-1].scores["outcome"] == 0
        assert (turns[-1].scores["turns"], turns[-1].scores["searches"]) == (3, 2)
    assert undeclared(run) == []
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "learner/grad_norm" in record]
    assert {record["version"] for record in trained} == set(range(1, UPDATES + 1))
    for record in trained:
        assert record["score/judge_valid"] == 1
        assert record["ppr/turn_pay_wrong"] == pytest.approx(record["score/process"] - 1)
        assert record["score/sampled_tokens"] < record["score/response_tokens"]
        assert record["critic/loss"] >= 0
    assert "process" in json.loads((run / "summary.json").read_text())["heldout"]["end"]["measures"]
    assert not left_over(run)
