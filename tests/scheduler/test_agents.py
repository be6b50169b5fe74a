"""Agents in processes of their own, whose turns grow in trees: every strategy, exact tokens, limits
and budgets."""

import asyncio
import gc
from typing import Any

import pytest

from coppice.actors.environments.agents.environment import OVER
from coppice.actors.environments.agents.episode import Episode
from coppice.actors.environments.agents.gateway import Session
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.strategies import chain, full, mc_value, ppr, slate, tree_grpo
from coppice.scheduler.growth.tree import Tree
from tests.agent_stage import Stages, adds

AGENTS = '''
from concurrent.futures import ThreadPoolExecutor

def endless(task):
    messages = [user("go")]
    while True:
        messages += [call(messages), user("on")]
        if "used up" in messages[-2]["content"]:
            return 0.25

def writing(task):
    call([user("one")])
    while True:
        print("x" * 1000)

def rewarded(task):
    call([user("one")])
    post("/episode/reward", {"reward": 0.75})

def unscored(task):
    call([user("one")])

def retrying(task):
    """Asks again, as a client does that has lost its connection."""
    again = {"x-stainless-retry-count": "1"}
    first, second = (ask([user("one")], headers=headers) for headers in ({}, again))
    return float(first["id"] == second["id"])

def limiting(task):
    return float(ask([user("one")], max_tokens=1)["choices"][0]["finish_reason"] == "length")

def deaf(task):
    messages = [user("go")]
    while True:
        messages += [call(messages), user("on")]

def fan(task):
    """Asks one question, then six at the same time that go on from the reply, then a last one."""
    messages = [user("go")]
    messages.append(call(messages))
    with ThreadPoolExecutor(6) as pool:
        parts = [[*messages, user(f"part {i}")] for i in range(6)]
        replies = [reply["content"] for reply in pool.map(call, parts)]
    call([user(" ".join(replies))])
    return float(len(replies))
'''


async def test_a_conversation_is_one_path_of_the_tokens_read_and_sampled(stage: Stages) -> None:
    s = stage(adds, "counting")
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [a.scores["valid"] for a in actions] == [1, 1, 1]
    assert actions[-1].scores["outcome"] == 1.0
    s.check(tree)
    result = "user\n<tool_response>\n3\n</tool_response></s>"
    observed = tree.children(actions[0])[0].text
    assert observed == f"\n<|im_start|>{result}\n<|im_start|>assistant\n"
    whole = s.read(tree, actions[-1])
    assert whole.count("</s>") == 2 + 3 + 2, "a reply's end was sampled and written again"


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "options", "outcome", "crashed"),
    [
        ("endless", {"horizon": 3}, 0.25, 0.0),
        ("writing", {"output_mib": 0.1}, 0.0, 1.0),
        ("rewarded", {}, 0.75, 0.0),
        ("unscored", {}, None, 0.0),
        ("deaf", {"horizon": 3}, 0.0, 1.0),
        ("retrying", {}, 1.0, 0.0),
        ("limiting", {}, 1.0, 0.0),
    ],
)
async def test_how_an_episode_ends(
    stage: Stages, name: str, options: Any, outcome: float | None, crashed: float
) -> None:
    s = stage(lambda prompt, i: "r", name, **options)
    tree = await s.grow(chain)
    last = tree.actions()[-1]
    assert (last.scores.get("outcome"), last.scores["crashed"]) == (outcome, crashed)
    assert len(tree.actions()) == len(s.policy.samples) == options.get("horizon", 1)
    assert not any(OVER in node.text for node in tree.nodes.values())


@pytest.mark.second
async def test_ppr_goes_on_after_a_reply_without_a_call(stage: Stages) -> None:
    s = stage(lambda prompt, i: "r", "endless", horizon=3)
    tree = await s.grow(ppr)
    assert (len(tree.actions()), tree.actions()[-1].scores["outcome"]) == (3, 0.25)


def parts(prompt: str, i: int) -> str:
    return "r" + "".join(character for character in prompt[-60:] if character.isdigit())


@pytest.mark.second
@pytest.mark.parametrize(
    ("strategy", "options", "k"), [(chain, {}, 1), (slate, {"k": 2}, 1), (full, {"k": 2}, 2)]
)
async def test_parallel_calls_are_all_answered_below_what_each_has_read(
    stage: Stages, strategy: Any, options: dict[str, Any], k: int
) -> None:
    s = stage(parts, "fan")
    tree = await s.grow(strategy, **options)
    s.check(tree)
    for trajectory in range(k):
        first, *middle, last = tree.actions(trajectory)
        assert [tree.nodes[action.parent].parent for action in middle] == [first.id] * 6
        assert {tree.nodes[action.parent].text.count("part") for action in middle} == {1}
        assert tree.nodes[last.parent].parent == 0 and last.scores["outcome"] == 6.0


async def test_parallel_calls_end_at_the_budget(stage: Stages) -> None:
    s = stage(parts, "fan", horizon=4)
    tree = await s.grow(chain)
    s.check(tree)
    assert len(s.policy.samples) == 4 and tree.actions()[-1].scores["outcome"] == 6.0


async def test_a_fork_among_parallel_calls_leaves_the_other_trajectory_as_it_is(
    stage: Stages,
) -> None:
    """The parts after the fork go on from a reply that both trajectories share."""
    s = stage(parts, "fan")
    tree = await s.grow(tree_grpo, trees=1, rounds=1, nodes=4)
    forks = {node.trajectory for node in tree.nodes.values()} - {0}
    assert forks and tree.tip().scores["outcome"] == 6.0
    for trajectory in forks:
        actions = tree.actions(trajectory)
        assert len(actions) == 8 and tree.tip(trajectory) is actions[-1]
        assert actions[-1].scores["outcome"] == 6.0


@pytest.mark.second
async def test_parallel_calls_are_given_their_replies_again_in_a_replay(stage: Stages) -> None:
    s = stage(parts, "fan")
    tree = await s.grow(mc_value, continuations=2)
    assert [action.scores["mc_value"] for action in tree.actions()] == [6.0] * 8
    assert s.environment.replayed > 0 and s.counts["dropped_branches"] == 0


@pytest.mark.second
async def test_an_ended_episode_leaves_neither_its_tree_nor_its_contexts_in_memory(
    stage: Stages,
) -> None:
    s, kinds = stage(adds, "counting", retriever=True), (Context, Session, Episode, Tree)
    gc.freeze()  # only what is made from here on is looked at
    try:
        for number in range(1, 4):
            tree = Tree(number, s.task.id)
            s.journal.start_tree(tree, number, 0)
            await s.grow(full, tree, k=2)
            del tree
        await asyncio.gather(*s.environment._closing)
        gc.collect()
        assert [one for one in gc.get_objects() if type(one) in kinds] == []
    finally:
        gc.unfreeze()
