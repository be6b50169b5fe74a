"""What a run's scheme and its newest policy say of journaled turns."""

import contextlib
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from coppice.actors.engines import weights
from coppice.learner.model.publish import publish
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting import frames, replay
from coppice.tools.inspecting.dump import main
from coppice.wire.messages import Turn
from tests.tools.said import Said
from tests.updates import batch, process, trainer

REWARDS = [[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]]
TEMPERATURE = 0.5
LETTERS = "prune"


def grown(folder: Path, model: Path, **settings: object) -> list[Tree]:
    """Journal two trees of three candidates each, trained together into version 1, with the process
    file of their learner."""
    (folder / "processes").mkdir()
    of_run = process(model, folder, **settings)  # pyright: ignore[reportArgumentType]
    of_run = msgspec.structs.replace(of_run, temperature=TEMPERATURE)
    (folder / "processes" / "learner.json").write_bytes(msgspec.json.encode(of_run))
    words = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    journal, trees = Journal(folder / "journal.sqlite"), []
    for i, rewards in enumerate(REWARDS):
        tree = Tree(i, f"task{i}")
        root = tree.add(None, "prompt", np.arange(60 + i, 65 + i, dtype=np.int32), "q")
        turns = []
        for k, reward in enumerate(rewards):
            tokens = np.array(words.encode(LETTERS[: 3 + k]).ids, np.int32)
            node = tree.add(root, "action", tokens, "a", scores={"reward": reward, "outcome": 1.0})
            node.logprobs = np.full(len(tokens), -1.5, np.float32)
            node.versions = np.zeros(len(tokens), np.int32)
            turns.append(Turn(node.id, k, 1, {"reward": reward}))
        journal.start_tree(tree, i, 0)
        journal.save_group(tree, i, turns)
        journal.mark_trained(i, 1)
        journal.close_tree(tree)
        trees.append(tree)
    journal.close()
    return trees


def column(folder: Path) -> list[float | None]:
    _, nodes = frames.read(folder)
    actions = nodes.filter(frames.ACTION)
    return actions["advantage"].to_list()


def test_a_turn_has_the_advantage_of_the_runs_scheme(tmp_path: Path, llama: Path) -> None:
    grown(tmp_path, llama, scheme="rloo")
    assert column(tmp_path) == pytest.approx([1 - 4.0, 2 - 3.5, 6 - 1.5, -1.5, -1.5, 3.0])


def test_a_scheme_sees_all_trees_of_the_update(tmp_path: Path, llama: Path) -> None:
    grown(tmp_path, llama, scheme="reinforce_pp", scheme_options={"baseline": "group"})
    rewards = np.array(REWARDS)
    centred = (rewards - rewards.mean(1, keepdims=True)).ravel()
    tokens = np.repeat(centred, [3, 4, 5, 3, 4, 5])
    given = np.array(column(tmp_path), float)
    # whitened over all tokens of both trees
    assert given == pytest.approx((centred - tokens.mean()) / tokens.std())
    journal = frames.opened(tmp_path)
    alone = journal.tree(*journal.trees("id=1"))
    # not a batch of its own
    assert [alone.nodes[i].scores["advantage"] for i in (1, 2, 3)] == pytest.approx(given[3:])


def test_an_update_that_lost_a_node_is_shown_without_advantages(
    tmp_path: Path, llama: Path
) -> None:
    grown(tmp_path, llama, scheme="rloo")
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as book:
        book.execute("DELETE FROM nodes WHERE tree=1 AND id=0")
        book.commit()
    _, nodes = frames.read(tmp_path)
    assert len(nodes.filter(frames.ACTION)) == 6 and "advantage" not in nodes.columns


def test_trees_can_be_seen_through_another_scheme(tmp_path: Path, llama: Path) -> None:
    grown(tmp_path, llama, scheme="rloo")
    journal = frames.opened(tmp_path)
    own = replay.learner(tmp_path)
    given = replay.advantages(journal, journal.trees(), own.learner, "slate", ddof=0, eps=1e-9)
    expected = (np.array(REWARDS[0]) - 3) / np.std(REWARDS[0])
    assert [given[0, node] for node in (1, 2, 3)] == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"'vineppo' reads .*'mc_value'"):
        replay.advantages(journal, journal.trees(), own.learner, "vineppo")


@pytest.mark.parametrize("rank", [None, 0, 4], ids=["start", "full", "lora"])
def test_the_newest_policys_log_probabilities_are_those_of_its_model(
    tmp_path: Path, llama: Path, rank: int | None
) -> None:
    trees = grown(tmp_path, llama)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    if rank is not None:
        made = trainer(llama, tmp_path, rank)
        made.update(batch(3, 0))
        published = publish(made.policy, 1, tmp_path, 2)
        weights.apply(model, llama, weights.verified(Path(published.path), published.digest))
    journal = frames.opened(tmp_path)
    version, values = replay.newest(journal, journal.trees(), tmp_path)
    assert version == (rank is not None) and len(values) == 6
    for tree in trees:
        for node in (tree.nodes[i] for i in (1, 2, 3)):
            ids = torch.as_tensor(tree.prefix(node).astype(np.int64))
            with torch.no_grad():
                scores = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
            start = len(ids) - len(node.tokens)
            expected = [scores[at - 1, ids[at]].item() for at in range(start, len(ids))]
            assert values[tree.id, node.id].tolist() == pytest.approx(expected, abs=2e-4)


def test_tokens_are_printed_with_their_log_probabilities(
    tmp_path: Path, llama: Path, said: Said, refused: Said
) -> None:
    grown(tmp_path, llama)
    command = (main, tmp_path, "--tree", "1", "--tokens")
    shown = said(*command)
    assert all(f"-1.5000  {letter!r}" in shown for letter in LETTERS[:3])
    assert "newest: version 0" in said(*command, "--newest")
    (tmp_path / "processes" / "learner.json").unlink()
    assert f"{tmp_path} has no processes/learner.json" in refused(*command, "--newest")
