"""Agents in processes of their own, whose turns grow in trees: every strategy, exact tokens, replay
after a crash, limits and budgets."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.strategies import chain, slate
from coppice.wire.faults import DataFault
from tests.agent_stage import Stage, adds

AGENTS = '''
import json, os, sys, urllib.request

def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))

def call(messages, tools=()):
    return post("/chat/completions", {"model": "any", "messages": messages, "tools": list(tools), "temperature": 0.1})["choices"][0]["message"]

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

def counting(task):
    """Calls a tool as long as the policy wants, and writes its history in its own way."""
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": task["question"]}]
    while True:
        reply = call(messages, [ADD])
        if not reply.get("tool_calls"):
            return float(reply["content"].strip() == task["golds"][0])
        told = {"role": "assistant", "content": reply["content"] or "", "tool_calls": []}
        answers = []
        for i, one in enumerate(reply["tool_calls"]):
            arguments = json.loads(one["function"]["arguments"])
            told["tool_calls"].append({"id": f"mine{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments, indent=2)}})
            answers.append({"role": "tool", "tool_call_id": f"mine{i}", "content": [{"type": "text", "text": str(sum(arguments.values()))}]})
        messages += [told, *answers]

def nested(task):
    """Asks a second agent in between, with a conversation of its own, and then goes on with the first."""
    messages = [{"role": "user", "content": "main"}]
    messages += [call(messages), {"role": "user", "content": "more"}]
    call([{"role": "system", "content": "You help."}, {"role": "user", "content": "sub"}])
    messages += [call(messages), {"role": "user", "content": "last"}]
    call(messages)
    return 1.0

def endless(task):
    messages = [{"role": "user", "content": "go"}]
    while True:
        messages += [call(messages), {"role": "user", "content": "on"}]
        if "used up" in messages[-2]["content"]:
            return 0.25

def crashing(task):
    call([{"role": "user", "content": "one"}])
    raise RuntimeError("the agent's own fault")

def silent(task):
    sys.exit("nothing to ask")

def writing(task):
    call([{"role": "user", "content": "one"}])
    while True:
        print("x" * 1000)

def rewarded(task):
    call([{"role": "user", "content": "one"}])
    post("/episode/reward", {"reward": 0.75})

def unscored(task):
    call([{"role": "user", "content": "one"}])
'''


async def test_a_conversation_is_one_path_of_exactly_the_tokens_that_were_read_and_sampled(
    stage: Callable[..., Stage],
) -> None:
    s = stage(adds, "counting")
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [a.scores["valid"] for a in actions] == [1, 1, 1]
    assert actions[-1].scores["outcome"] == 1.0
    for action, prompt in zip(actions, s.policy.prompts, strict=True):
        above = tree.parent(action)
        assert above is not None
        assert (
            s.text.tokenizer.decode(tree.prefix(above).tolist(), skip_special_tokens=False)
            == prompt
        )
    observation = tree.children(actions[0])[0]
    assert (
        observation.text
        == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response></s>\n<|im_start|>assistant\n"
    )
    whole = s.text.tokenizer.decode(tree.prefix(actions[-1]).tolist(), skip_special_tokens=False)
    assert whole.count("</s>") == 2 + 3 + 2, "a reply's end was sampled and written again"


async def test_slate_samples_candidates_for_an_agent_that_knows_nothing_of_it(
    stage: Callable[..., Stage],
) -> None:
    s = stage(adds, "counting")
    tree = await s.grow(slate, k=3, selection="best-of-k")
    chosen = tree.actions()
    assert [len(turns) for turns in s.groups] == [3, 3, 3]
    assert [a.text.count("Well.") for a in chosen] == [2, 2, 0]
    assert s.environment.replayed == 0


async def test_another_conversation_is_a_branch_and_the_first_one_goes_on_where_it_was(
    stage: Callable[..., Stage],
) -> None:
    s = stage(lambda prompt, i: "r" + str(prompt.count("<|im_start|>")), "nested")
    tree = await s.grow(chain)
    actions = tree.actions()
    assert len(actions) == 4
    above = [tree.nodes[action.parent] for action in actions]
    roots = [node for node in tree.nodes.values() if node.kind == "prompt" and node.parent == 0]
    assert above[0] in roots and above[1] in roots and len(roots) == 2
    assert tree.parent(above[2]) is actions[0], "the first conversation goes on below its reply"
    assert tree.parent(above[3]) is actions[2]
    assert "You help." in above[1].text and "You help." not in s.policy.prompts[2]


async def test_a_half_grown_tree_goes_on_by_replay(stage: Callable[..., Stage]) -> None:
    s = stage(adds, "counting")
    context = Context(s.runtime, s.task, s.tree, random.Random(1))
    await context.plant()
    node = await context.tip()
    for _ in range(2):
        (action,) = await context.generate(node, 1)
        action.chosen = True
        place = await context.onward(action)
        assert place is not None
        node = place
        context.save([action, node])
    expected = s.policy.prompts[-1]
    again = stage(adds, "counting")
    again.journal, (row,) = s.journal, s.journal.trees()
    tree = await again.grow(chain, s.journal.tree(row))
    assert again.environment.replayed == 2
    assert tree.actions()[-1].scores["outcome"] == 1.0
    assert again.policy.prompts[0].startswith(expected)


@pytest.mark.parametrize(
    ("name", "options", "outcome", "crashed"),
    [
        ("endless", {"horizon": 3}, 0.25, 0.0),
        ("crashing", {}, 0.0, 1.0),
        ("writing", {"output_mib": 0.1}, 0.0, 1.0),
        ("rewarded", {}, 0.75, 0.0),
        ("unscored", {}, None, 0.0),
    ],
)
async def test_how_an_episode_ends(
    stage: Callable[..., Stage],
    name: str,
    options: dict[str, Any],
    outcome: float | None,
    crashed: float,
) -> None:
    s = stage(lambda prompt, i: "r", name, **options)
    tree = await s.grow(chain)
    last = tree.actions()[-1]
    assert (last.scores.get("outcome"), last.scores["crashed"]) == (outcome, crashed)
    assert len(tree.actions()) == (3 if name == "endless" else 1)


async def test_an_agent_that_asks_nothing_is_a_fault_of_the_task(
    stage: Callable[..., Stage],
) -> None:
    with pytest.raises(DataFault, match=r"ended before it asked the policy .*nothing to ask"):
        await stage(lambda prompt, i: "r", "silent").grow(chain)


async def test_no_process_is_left(stage: Callable[..., Stage]) -> None:
    s = stage(adds, "counting")
    await s.environment.open(
        s.environment.initial(s.task), Context(s.runtime, s.task, s.tree, random.Random(1)).services
    )
    ((_, episode, _),) = s.environment._waiting
    await s.environment.close()
    assert episode._process is not None and episode._process.returncode == -9
    await asyncio.sleep(0)
