"""A recorded run's calls on simulated servers: what is replayed, and that the counts are right and the same each time."""

import random

import numpy as np
import pytest

from scheduler.fleet import Fleet
from scheduler.journal import Journal
from scheduler.tree import Tree
from tools.research.benches import recorded_fleet
from tools.research.benches.recorded_fleet import World

HEAD, QUESTION, ACTION, OBSERVATION, STEPS, CANDIDATES = 40, 10, 6, 20, 3, 3
"""Tokens of each part, and the shape of a tree."""


def tokens(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.randrange(100, 2**20) for _ in range(count)], np.int32)


def slate(number: int) -> Tree:
    """A tree of three steps: of each step's candidates the last goes on."""
    rng, tree = random.Random(number), Tree(number, str(number), "train")
    node = tree.add(None, "prompt", np.concatenate([np.arange(HEAD, dtype=np.int32), tokens(rng, QUESTION)]), "")
    for _ in range(STEPS):
        versions = np.zeros(ACTION, np.int32)
        *_, action = [tree.add(node, "action", tokens(rng, ACTION), "", versions=versions) for _ in range(CANDIDATES)]
        node = tree.add(action, "observation", tokens(rng, OBSERVATION), "")
    return tree


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run's folder with the journal of eight trees."""
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(folder / "journal.sqlite")
    for number in range(8):
        tree = slate(number)
        journal.start_tree(tree, number, 0)
        journal.close_tree(tree)
    journal.close()
    return str(folder)


def test_the_calls_of_a_journal_depend_on_each_other_as_they_did_in_the_run(run: str) -> None:
    trees = recorded_fleet.recorded(run)
    assert len(trees) == 8
    for number, (call,) in enumerate(trees):
        tree, lengths = slate(number), []
        while True:
            assert [sample.tolist() for sample in call.samples] in [
                [n.tokens.tolist() for n in tree.children(node)] for node in tree.nodes.values()
            ]
            lengths.append(len(call.prefix))
            if not call.below:
                break
            (call,) = call.below
        assert lengths == [HEAD + QUESTION + step * (ACTION + OBSERVATION) for step in range(STEPS)]


def test_one_server_that_forgets_nothing_computes_each_distinct_token_once(run: str) -> None:
    trees = recorded_fleet.recorded(run)
    world = World(Fleet(), False, trees, at_once=2).run()
    # Of each action that goes on, the last token was sampled and never computed.
    assert world.prefilled == HEAD + 8 * (QUESTION + (STEPS - 1) * (1 + OBSERVATION))
    assert world.requests == {"s00": 8 * STEPS * CANDIDATES}


def test_copies_share_the_head_of_all_prompts_and_nothing_else(run: str) -> None:
    trees = recorded_fleet.recorded(run)
    some = recorded_fleet.copies(trees, 24)
    world = World(Fleet(), False, some, at_once=4).run()
    assert world.prefilled == HEAD + 24 * (QUESTION + (STEPS - 1) * (1 + OBSERVATION))


def test_the_table_is_the_same_each_time_and_affinity_computes_little_on_all_servers(run: str) -> None:
    first, again = (recorded_fleet.run(run, servers=(2, 9), cache=1.0, at_once=8, waves=3) for _ in range(2))
    assert first == again
    for count in (2, 9):
        rows = first[f"{count} servers"]
        assert set(rows) == set(recorded_fleet.WAYS)
        ratios = {name: row["ratio"] for name, row in rows.items()}
        assert 1 <= ratios["ours"] < min(ratios["arrival, least loaded"], ratios["round robin"])
        assert ratios["router, round robin"] == max(ratios.values())
        assert rows["ours"]["balance_samples"] < rows["router, cache-aware"]["balance_samples"]
        assert all(1 <= row["balance_samples"] <= count and 0 <= row["hit_rate"] < 1 for row in rows.values())
