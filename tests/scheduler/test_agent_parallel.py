"""Agents that call the policy several times at the same time, and what their episodes leave."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from coppice.actors.environments.agents.episode import Episode
from coppice.actors.environments.agents.gateway import Session
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.strategies import chain, full, mc_value, slate
from coppice.scheduler.growth.tree import Tree
from tests.agent_stage import Stages

AGENTS = '''
from concurrent.futures import ThreadPoolExecutor

def fan(task):
    """Asks one question, then six at the same time that go on from the reply, then a last one."""
    messages = [user("go")]
    messages.append(call(messages))
    with ThreadPoolExecutor(6) as pool:
        parts = [[*messages, user(f"part {i}")] for i in range(6)]
        replies = [reply["content"] for reply in pool.map(call, parts)]
    call([user(" ".join(replies))])
    return float(len(replies))

def lasting(task):
    messages = [user("go")]
    for i in range(2):
        messages += [call(messages), user("on")]
    return 1.0
'''


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


@pytest.mark.second
async def test_parallel_calls_are_given_their_replies_again_in_a_replay(stage: Stages) -> None:
    s = stage(parts, "fan")
    tree = await s.grow(mc_value, continuations=2)
    assert [action.scores["mc_value"] for action in tree.actions()] == [6.0] * 8
    assert s.environment.replayed > 0 and s.counts["dropped_branches"] == 0


@pytest.mark.second
async def test_an_ended_episode_leaves_neither_its_tree_nor_its_contexts_in_memory(
    stage: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = {kind: weakref.WeakSet[Any]() for kind in (Context, Session, Episode, Tree)}
    for kind, ones in alive.items():

        def noted(
            self: Any, *args: Any, ones: weakref.WeakSet[Any] = ones, start: Any = kind.__init__
        ) -> None:
            ones.add(self)
            start(self, *args)

        monkeypatch.setattr(kind, "__init__", noted)
    s = stage(parts, "lasting", retriever=True)

    async def play(number: int) -> None:
        tree = Tree(number, s.task.id)
        s.journal.start_tree(tree, number, 0)
        await s.grow(full, tree, k=2)

    for number in range(1, 4):
        await play(number)
    await asyncio.gather(*s.environment._closing)
    gc.collect()
    assert {kind: list(ones) for kind, ones in alive.items()} == {
        Context: [],
        Session: [],
        Episode: [],
        Tree: [s.tree],
    }
