"""What has gone wrong elsewhere where agents train through a gateway: thoughts that a template
leaves out, rewritten prompts, failures of one episode."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from coppice.scheduler.growth.strategies import chain, full
from coppice.wire.messages import GenerateRequest
from tests.agent_stage import THINKING, Stages

AGENTS = '''
def thoughtless(task):
    """Keeps what stands after the thoughts, without the white space."""
    messages = [user("go")]
    for i in range(4):
        text = call(messages)["content"].split("</think>")[-1].strip()
        messages += [{"role": "assistant", "content": text}, user(f"on {i}")]
    return 1.0

def rewriting(task):
    """Has other tools, then another system prompt, and goes on with the first history at last."""
    messages = [{"role": "system", "content": "first rules"}, user("go")]
    messages += [call(messages, "look"), user("more")]
    call(messages, "look", "fetch")
    call([{"role": "system", "content": "other rules"}, *messages[1:]], "look")
    call(messages, "look")
    return 1.0

def unlucky(task):
    if "bad" in call([user("go")])["content"]:
        print("looking at it")
        raise RuntimeError("the tool is broken")
    return 1.0

def hasty(task):
    import socket
    socket.setdefaulttimeout(5.0)
    return float("good" in call([user("go")])["content"])

def graded(task):
    """Rewards its first and its last reply."""
    messages = [user("go")]
    for i in range(3):
        reply = ask(messages)
        if i != 1:
            post("/episode/reward", {"reward": i + 0.5, "response_id": reply["id"]})
        messages += [reply["choices"][0]["message"], user(f"on {i}")]

def stopping(task):
    """Ends each reply before a word of its own, which it never sees."""
    messages = [user("go")]
    for i in range(2):
        reply = call(messages, "look", stop=["Observation", "\\n\\n"])
        messages += [reply, user(f"on {i}")]
    return float(messages[1]["content"] == "I look. " == messages[3]["content"])
'''
CHAT = THINKING
WRAPPERS = ["<think>\nHm, number {}.\n</think>\n\n", "Begun by the template, {}.</think>", ""]


def counted(reply: str = "reply {}") -> Callable[[str, int], str]:
    """Replies that differ."""
    numbers = itertools.count()
    return lambda prompt, i: reply.replace("{}", str(next(numbers)))


@pytest.mark.second
@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_thoughts_that_are_left_out_stay_in_the_tree(stage: Stages, wrapper: str) -> None:
    s = stage(counted(wrapper + "reply {}."), "thoughtless")
    tree = await s.grow(full, k=3)
    s.check(tree)
    roots = [node for node in tree.nodes.values() if node.parent == 0]
    assert len(roots) == 3, "an episode has more than one path"
    for trajectory in range(3):
        actions = tree.actions(trajectory)
        path = [node for node in tree.path(actions[-1]) if node.kind == "action"]
        assert path == actions and len(actions) == 4
        assert s.read(tree, actions[-1]).count("</think>") == (4 if wrapper else 0)


async def test_other_tools_or_another_system_prompt_begin_a_branch(stage: Stages) -> None:
    s = stage(counted(), "rewriting")
    tree = await s.grow(chain)
    s.check(tree)
    above = [tree.nodes[action.parent] for action in tree.actions()]
    assert [node.parent for node in above] == [0, 0, 0, tree.actions()[0].id]
    assert ["fetch" in node.text for node in above] == [False, True, False, False]
    assert ["other rules" in node.text for node in above] == [False, False, True, False]
    assert all("look" in node.text for node in above[:3]), "the tools are lost"


@pytest.mark.second
async def test_an_agent_that_gives_up_waiting_is_begun_again_and_told_the_reply(
    stage: Stages,
) -> None:
    s = stage(lambda prompt, i: "good", "hasty")

    async def gone() -> None:
        s.policy.before, ((_, episode, _),) = None, s.environment._waiting
        while not episode.over:
            await asyncio.sleep(0.01)

    s.policy.before = gone
    tree = await s.grow(chain)
    s.check(tree)
    assert tree.actions()[-1].scores["outcome"] == 1 and s.counts["crashed_episodes"] == 0


async def test_an_episode_that_fails_leaves_the_others_their_outcomes(stage: Stages) -> None:
    numbers = itertools.count()
    s = stage(lambda prompt, i: "bad" if next(numbers) == 1 else "good", "unlucky")
    tree = await s.grow(full, k=3)
    s.check(tree)
    last = [tree.actions(trajectory)[-1].scores for trajectory in range(3)]
    ends = sorted((scores["crashed"], scores["outcome"]) for scores in last)
    assert ends == [(0, 1), (0, 1), (1, 0)]
    assert s.counts["crashed_episodes"] == 1
    s.journal.close_tree(tree)
    tree = s.reread()
    notes = [tree.actions(trajectory)[-1].notes for trajectory in range(3)]
    (kept,) = (note["crashed"] for note in notes if "crashed" in note)
    assert kept.splitlines()[0] == "exit status 1: RuntimeError: the tool is broken"
    assert "Its last output:\nlooking at it\nTraceback" in kept


async def test_a_reward_of_a_reply_is_its_column_and_the_others_have_none(stage: Stages) -> None:
    s = stage(counted(), "graded", step_rewards=True)
    tree = await s.grow(chain)
    s.check(tree)
    assert s.environment.gives_step_rewards
    assert [action.scores.get("step_reward") for action in tree.actions()] == [0.5, None, 2.5]
    assert "outcome" not in tree.actions()[-1].scores


async def test_what_ends_a_reply_was_sampled_and_the_agent_does_not_get_it(stage: Stages) -> None:
    s = stage(lambda prompt, i: "I look. Observation", "stopping")
    stops, call = list[Any](), s.policy.call

    async def noted(service: str, request: Any, **more: Any) -> Any:
        if isinstance(request, GenerateRequest):
            stops.append(request.sampling.stop)
        return await call(service, request, **more)

    s.policy.call = noted
    tree = await s.grow(chain)
    s.check(tree)
    first, last = tree.actions()
    assert stops == [["Observation", "\n\n"]] * 2
    assert tree.nodes[last.parent].parent == first.id and last.scores["outcome"] == 1.0
    assert first.text == "I look. Observation"
