"""A whole run in each kind of environment, and of an agent that is a Python function."""

from pathlib import Path

import torch

from coppice.common import vision
from coppice.tools.inspecting.export import main as export
from tests import world
from tests.conversations import WORDS
from tests.runs import Launch
from tests.world import QUESTIONS, UPDATES


def test_chains_of_a_game_against_two_opponents_train_to_the_end(
    tmp_path: Path, launch: Launch
) -> None:
    config = world.playing(tmp_path, "tests.games:AnyText")
    run = launch(
        config,
        """data.options={prompt='tictactoe_compact',opponents={tictactoe_minimax=0.5,random=0.5}}
        judges.use={tictactoe={kind='minimax'},tictactoe_minimax={}} scheduler.judge=tictactoe
        scheduler.max_action_tokens=3 actors.max_context=96 scheduler.strategy=chain
        scheduler.evaluation={questions=6,options={opponents={random=1.0}}}
        learner.scheme=turn_grpo""",
    )
    run.finish()
    run.check()
    games = run.groups()
    for tree, turns in zip(run.trees(), games, strict=True):
        assert [t.node for t in turns] == [n.id for n in tree.nodes.values() if n.kind == "action"]
        assert all(turn.scores["valid"] == 1 and turn.scores["reward"] in (0, 1) for turn in turns)
        outcomes = [turn.scores["outcome"] for turn in turns if "outcome" in turn.scores]
        assert outcomes == [turns[-1].scores["outcome"]]
    assert max(map(len, games)) >= 3
    opponents = {
        split: {tree.nodes[0].state["opponent"] for tree in run.trees(f"split='{split}'")}
        for split in ("train", "heldout")
    }
    assert opponents == {"train": {"tictactoe_minimax", "random"}, "heldout": {"random"}}
    summary = run.summary()
    end = summary["heldout"]["end"]
    assert (end["version"], end["questions"], end["measures"]["valid"]["mean"]) == (UPDATES, 6, 1)
    assert summary["quarantined"] == []


def test_a_run_in_the_shop_trains_on_its_rewards(tmp_path: Path, launch: Launch) -> None:
    config = world.playing(tmp_path, "tests.shop:AnyText", max_position_embeddings=16384)
    run = launch(
        config,
        """data.options={history=1,horizon=6} judges.use={webshop={}} scheduler.judge=webshop
        scheduler.strategy=full scheduler.strategy_options={k=3} scheduler.max_action_tokens=3
        scheduler.updates=2 scheduler.evaluation.questions=4 actors.kv_cache_gib=0.1
        actors.max_context=8192 learner.scheme=gigpo learner.scheme_options.column=step_reward""",
    )
    run.finish()
    turns = [turn for group in run.groups() for turn in group]
    assert {turn.scores["reward"] for turn in turns} >= {0.0, 1.0}
    assert {turn.scores["step_reward"] for turn in turns} <= {0.0, 10.0}
    ends = [turn.scores for turn in turns if "outcome" in turn.scores]
    assert len(ends) == 2 * QUESTIONS * 3
    anchors = [turn.anchor for turn in turns]
    assert None not in anchors
    # situations recur: the search page begins every trajectory
    assert len(set(anchors)) < len(anchors)
    measures = run.summary()["heldout"]["end"]["measures"]
    assert {"success", "score", "oracle", "valid"} <= set(measures)


def test_conversations_with_a_frozen_copy_are_trained_by_oprl(
    tmp_path: Path, launch: Launch
) -> None:
    config = world.playing(tmp_path, "tests.conversations:AnyWords", max_position_embeddings=8192)
    run = launch(
        config,
        """data.options={turns=6,partner='frozen',partner_tokens=3} scheduler.judge=none
        judges.use={sotopia_rules={},frozen={endpoint={url='served',max_tokens=64}}}
        judges.model={name='policy',kv_cache_gib=0.1} scheduler.max_action_tokens=3
        scheduler.strategy=full scheduler.strategy_options={k=3} scheduler.updates=2
        scheduler.questions_per_update=2 scheduler.evaluation.questions=4
        actors.kv_cache_gib=0.1 actors.max_context=4096 learner.prm={threshold=0.6,lr=1e-3}
        learner.scheme=oprl learner.scheme_options={base='grpo',invalid_penalty=0.0}""",
    )
    run.finish()
    run.check(2, 2, learns=False)
    for tree, turns in zip(run.trees(), run.groups(), strict=True):
        # six turns are three of the trained side, whichever side it is
        goals = [turn.scores.get("goal") in (0, 10) for turn in turns]
        assert goals == [False, False, True] * 3
        answers = [node.text for node in tree.nodes.values() if node.kind == "observation"]
        assert len(answers) == len(turns)
        assert any(f'said: "{words}"' in answer for words in WORDS for answer in answers)
    summary = run.summary()
    assert summary["counts"]["spoken_replies"] >= 24
    assert summary["quarantined"] == []


def test_a_policy_trains_on_pictures_and_goes_on_after_kill_9(
    tmp_path: Path, launch: Launch
) -> None:
    config = world.playing(tmp_path, "tests.pictures:Colours", seeing=True)
    run = launch(
        config,
        """data.options={turns=3} scheduler.strategy=full scheduler.strategy_options={k=3}
        scheduler.judge=none scheduler.max_action_tokens=4 scheduler.questions_per_update=2
        scheduler.evaluation.questions=2 actors.max_context=96 learner.count=2
        learner.scheme=oprl learner.scheme_options={base='rloo'} learner.kl_coef=0.01
        learner.prm={lr=1e-3}""",
    )
    run.killed_and_resumed()
    run.check(questions=2)
    for tree in run.trees():
        prompts = [node for node in tree.nodes.values() if node.kind == "prompt"]
        assert [len(vision.runs(node.tokens)) for node in prompts] == [1] * len(prompts)
        assert len(prompts) == 1 + 3 * 3
    trained = run.trained()
    # the engine's log-probabilities are the learner's
    assert trained[0]["learner/logprob_gap_max"] < 1e-3
    assert all(r["learner/forwarded_tokens"] < r["learner/path_tokens"] for r in trained)
    assert export([str(run.folder), "--out", str(tmp_path / "policy")]) == 0
    held = vision.load(tmp_path / "policy", torch.float32, "sdpa").state_dict()
    first = vision.load(tmp_path / "model", torch.float32, "sdpa").state_dict()
    changed = {name for name, tensor in held.items() if (tensor != first[name]).any()}
    assert changed
    assert not any("visual" in name for name in changed)


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


def test_an_agent_is_trained_as_it_is_and_goes_on_after_kill_9_of_everything(
    searching: Path, tmp_path: Path, launch: Launch
) -> None:
    (tmp_path / "agent_of_a_test.py").write_text(AGENT)
    run = launch(
        searching,
        """data.agent=agent_of_a_test:run data.options={} scheduler.strategy=full
        scheduler.judge=none scheduler.evaluation.questions=4 actors.count=2 learner.count=2
        learner.scheme=grpo learner.scheme_options={column='outcome'}""",
        cwd=tmp_path,
    )
    run.killed_and_resumed()
    run.check()
    for tree in run.trees():
        for trajectory in range(3):
            first, last = tree.actions(trajectory)
            assert "outcome" in last.scores and last.scores["crashed"] == 0.0
            # the second call goes on where the first ended
            assert tree.path(last)[:-2] == tree.path(first)
    assert {"return", "crashed"} <= set(run.summary()["heldout"]["end"]["measures"])
