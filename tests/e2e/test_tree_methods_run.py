"""A short whole run of each tree method: real engine, scheduler, journal and learner, with the
method's own strategy and scheme."""

import json
from pathlib import Path

import pytest

from coppice.scheduler.ledger.journal import Journal
from tests.e2e.test_run import check_gradients, check_groups, finish, launch, left_over, prepare

UPDATES, QUESTIONS = 2, 3

CONFIG = """
name = "trees"
[model]
name = "{folder}/model"
[data]
train = "{folder}/tasks.jsonl"
heldout = "{folder}/tasks.jsonl"
corpus = "{folder}/corpus.jsonl"
environment = "tests.search:CoinSearch"
[data.options]
prompt = "question"
topk = 1
[warm_start]
steps = 0
[scheduler]
strategy = "{strategy}"
strategy_options = {options}
judge = "none"
budget = 3
max_action_tokens = 8
updates = {updates}
questions_per_update = {questions}
[scheduler.evaluation]
questions = 0
[actors]
count = 1
dtype = "float32"
max_context = 1024
kv_cache_gib = 0.01
[judges.use."tests.search:Coin"]
[learner]
count = 1
scheme = "{scheme}"
{correction}
aggregation = "token"
lr = 1e-3
dtype = "float32"
lora = {{ rank = 4, alpha = 8.0 }}
"""

METHODS = {
    "tree_grpo": ("tree_grpo", "{ trees = 2, nodes = 2 }", 6),
    "treerl": ("treerl", "{ trees = 2, tokens = 1, continuations = 2 }", 6),
    "treepo": ("treepo", "{ leaves = 5, segment = 4, depth = 3 }", 5),
    "spo": ("spo", "{ branching = [2, 3], segment = 4 }", 6),
    "arpo": ("arpo", "{ budget = 5, initial = 2, base = 0.9 }", 5),
    "vineppo": ("mc_value", "{ continuations = 3 }", 1),
    "sao": ("chain", "{}", 1),
}
"""By scheme: the strategy, its options, and the trajectories that it trains per question."""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", METHODS)
def test_a_tree_method_trains_on_all_its_leaves(scheme: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    strategy, options, leaves = METHODS[scheme]
    correction = (
        'correction = "icepop"\ncritic = { steps = 2, lr = 1e-3 }' if scheme == "sao" else ""
    )
    config, run = tmp_path / "trees.toml", tmp_path / "run"
    config.write_text(
        CONFIG.format(
            folder=tmp_path, strategy=strategy, options=options, scheme=scheme, correction=correction, updates=UPDATES,
            questions=QUESTIONS,
        )
    )  # fmt: skip
    process = launch(config, run)
    out = finish(process)
    assert process.returncode == 0, out
    assert left_over(run) == []
    check_groups(run, UPDATES, QUESTIONS)
    check_gradients(run, UPDATES)
    journal = Journal(run / "journal.sqlite", readonly=True)
    for tree in journal.trees("split='train'"):
        groups = [journal.turns(group) for group, _ in journal.groups(tree.id)]
        assert len(groups) == (2 if scheme == "tree_grpo" else 1)
        turns = [turn for group in groups for turn in group]
        paths = {(i, turn.trajectory) for i, group in enumerate(groups) for turn in group}
        assert len(paths) == leaves
        nodes = journal.tree(tree).nodes
        own = {turn.node for turn in turns}
        assert own == {
            node.id for node in nodes.values() if node.kind == "action" and not node.forced
        }
        for fork in (nodes[id] for id in own if nodes[id].kept):
            assert any(
                other.id != fork.id and other.parent == fork.parent
                and other.tokens[: fork.kept].tolist() == fork.tokens[: fork.kept].tolist()
                for other in nodes.values()
            )  # fmt: skip
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(
        row["learner/forwarded_tokens"] > 0 for row in metrics if "learner/forwarded_tokens" in row
    )
    engine_gap = max(
        row["watch/engine_gap_max"] for row in metrics if "watch/engine_gap_max" in row
    )
    assert engine_gap < 1e-3  # copied log-probabilities are those of the tokens they belong to
