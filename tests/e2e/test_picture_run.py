"""A whole run of OPRL with a policy that reads pictures: full trajectories, the implicit reward
model, kill -9, and the dump."""

import json
from pathlib import Path

import pytest
import torch

from coppice.common import vision
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.export import main as export
from tests import tiny
from tests.e2e.test_run import (
    check_groups,
    finish,
    kill_everything,
    launch,
    left_over,
    wait_for_update,
)

UPDATES, TREES, K = 3, 2, 3

CONFIG = """
name = "pictures"
[model]
name = "{model}"
[data]
environment = "tests.pictures:Colours"
[data.options]
turns = 3
[warm_start]
steps = 0
[scheduler]
strategy = "full"
strategy_options = {{ k = {k} }}
judge = "none"
max_action_tokens = 4
updates = {updates}
questions_per_update = {trees}
max_staleness = 1
[scheduler.evaluation]
questions = 2
[actors]
count = 1
dtype = "float32"
kv_cache_gib = 0.01
max_context = 96
[learner]
count = {ranks}
scheme = "oprl"
scheme_options = {{ base = "rloo" }}
lr = 1e-3
kl_coef = 0.01
dtype = "float32"
lora = {{ rank = {rank}, alpha = 8.0 }}
[learner.prm]
lr = 1e-3
"""


def written(folder: Path, rank: int, ranks: int) -> Path:
    """A config over a tiny model that reads pictures."""
    tiny.save_vision(folder / "model")
    path = folder / "pictures.toml"
    settings = {"updates": UPDATES, "trees": TREES, "k": K, "rank": rank, "ranks": ranks}
    path.write_text(CONFIG.format(model=folder / "model", **settings))
    return path


@pytest.mark.parametrize(("rank", "ranks"), [(4, 2), (0, 1)])
def test_a_policy_trains_on_pictures_and_goes_on_after_kill_9(
    tmp_path: Path, rank: int, ranks: int
) -> None:
    config, run = written(tmp_path, rank, ranks), tmp_path / "run"
    process = launch(config, run)
    if rank:
        wait_for_update(run, process)
        kill_everything(run, process)
        process = launch(config, run, "--resume", str(run))
    out = finish(process)
    assert process.returncode == 0, out
    check_groups(run, UPDATES, TREES)
    journal = Journal(run / "journal.sqlite", readonly=True)
    for row in journal.trees("split='train'"):
        prompts = [node for node in journal.tree(row).nodes.values() if node.kind == "prompt"]
        assert [len(vision.runs(node.tokens)) for node in prompts] == [1] * len(prompts)
        assert len(prompts) == 1 + 3 * K
        assert all(len(journal.pictures(node.tokens)) == 1 for node in prompts)
    stored = journal._db.execute("SELECT COUNT(*), COUNT(DISTINCT png) FROM pictures").fetchone()
    assert stored[0] == stored[1] <= 9  # the goal and eight others
    trained = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in trained if "learner/grad_norm" in record]
    # the engine's log-probabilities are the learner's
    assert trained[0]["learner/logprob_gap_max"] < 1e-3
    assert all(
        record["learner/forwarded_tokens"] < record["learner/path_tokens"] for record in trained
    )
    assert "prm/loss" in trained[-1]
    assert not left_over(run)
    assert export([str(run), "--out", str(tmp_path / "policy")]) == 0
    assert vision.Vision.of(tmp_path / "policy") is not None
    held = vision.load(tmp_path / "policy", torch.float32, "sdpa").state_dict()
    first = vision.load(tmp_path / "model", torch.float32, "sdpa").state_dict()
    changed = {name for name, tensor in held.items() if (tensor != first[name]).any()}
    assert changed
    assert not any("visual" in name for name in changed)
