"""A whole run of an agent in processes of its own: trained as it is, killed in the midst and
resumed, no process left."""

import json
from pathlib import Path

import pytest

from coppice.scheduler.ledger.journal import Journal
from tests.e2e.test_run import (
    CONFIG,
    UPDATES,
    check_whole,
    finish,
    kill_everything,
    launch,
    left_over,
    prepare,
    wait_for_update,
)

pytestmark = pytest.mark.slow
QUESTIONS = 3
AGENT = """
import json, os, urllib.request

def call(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def run(task):
    messages = [{"role": "user", "content": task["question"]}]
    messages += [call(messages), {"role": "user", "content": "Are you sure?"}]
    return float(len(set(call(messages)["content"])) % 5)
"""
OWN = """
[data]
agent = "agent_of_a_test:run"
train = "{folder}/tasks.jsonl"
heldout = "{folder}/tasks.jsonl"
[warm_start]
steps = 0
[scheduler]
strategy = "full"
judge = "none"
"""


def test_an_agent_is_trained_as_it_is_and_goes_on_after_kill_9_of_everything(
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    text = CONFIG.format(
        model=tmp_path / "model", folder=tmp_path, updates=UPDATES, questions=QUESTIONS
    )
    head, tail = text[: text.index("[data]")], text[text.index("strategy_options") :]
    tail = tail.replace(
        "lora = {", 'scheme = "grpo"\nscheme_options = { column = "outcome" }\nlora = {'
    )
    config, run = tmp_path / "agent.toml", tmp_path / "run"
    config.write_text(head + OWN.format(folder=tmp_path) + tail)
    (tmp_path / "agent_of_a_test.py").write_text(AGENT)
    process = launch(config, run, folder=tmp_path)
    wait_for_update(run, process)
    kill_everything(run, process)
    process = launch(config, run, "--resume", str(run), folder=tmp_path)
    out = finish(process)
    assert process.returncode == 0, out
    assert left_over(run) == []
    check_whole(run)
    journal = Journal(run / "journal.sqlite", readonly=True)
    for row in journal.trees("split='train'"):
        tree = journal.tree(row)
        for trajectory in range(3):
            first, last = tree.actions(trajectory)
            assert "outcome" in last.scores and last.scores["crashed"] == 0.0
            assert tree.path(last)[:-2] == tree.path(first), (
                "the second call goes on where the first ended"
            )
    assert {"return", "crashed"} <= set(
        json.loads((run / "summary.json").read_text())["heldout"]["end"]["measures"]
    )
