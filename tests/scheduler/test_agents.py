"""Agents in processes of their own, whose turns grow in trees: every strategy, exact tokens, replay
after a crash, limits and budgets."""

import asyncio
from typing import Any

import pytest

from coppice.scheduler.growth.strategies import chain, slate
from coppice.wire.faults import DataFault
from tests.agent_stage import Stages, adds

AGENTS = '''
import sys

def counting(task):
    """Calls a tool as long as the policy wants, and writes its history in its own way."""
    messages = [{"role": "system", "content": "Add."}, user(task["question"])]
    while (reply := call(messages, "add")).get("tool_calls"):
        calls, answers = [], []
        for i, one in enumerate(reply["tool_calls"]):
            arguments = json.loads(one["function"]["arguments"])
            written = {"name": "add", "arguments": json.dumps(arguments, indent=2)}
            calls.append({"id": f"mine{i}", "type": "function", "function": written})
            content = [{"type": "text", "text": str(sum(arguments.values()))}]
            answers.append({"role": "tool", "tool_call_id": f"mine{i}", "content": content})
        told = {"role": "assistant", "content": reply["content"] or "", "tool_calls": calls}
        messages += [told, *answers]
    return float(reply["content"].strip() == task["golds"][0])

def nested(task):
    """Asks a second agent in between, with a conversation of its own."""
    messages = [user("main")]
    messages += [call(messages), user("more")]
    call([{"role": "system", "content": "You help."}, user("sub")])
    messages += [call(messages), user("last")]
    call(messages)
    return 1.0

def endless(task):
    messages = [user("go")]
    while True:
        messages += [call(messages), user("on")]
        if "used up" in messages[-2]["content"]:
            return 0.25

def crashing(task):
    call([user("one")])
    raise RuntimeError("the agent's own fault")

def silent(task):
    sys.exit("nothing to ask")

def writing(task):
    call([user("one")])
    while True:
        print("x" * 1000)

def rewarded(task):
    call([user("one")])
    post("/episode/reward", {"reward": 0.75})

def unscored(task):
    call([user("one")])
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


async def test_slate_samples_candidates_for_an_agent_unknown_to_it(stage: Stages) -> None:
    s = stage(adds, "counting")
    tree = await s.grow(slate, k=3, selection="best-of-k")
    chosen = tree.actions()
    assert [len(turns) for turns in s.groups] == [3, 3, 3]
    assert [a.text.count("Well.") for a in chosen] == [2, 2, 0]
    assert s.environment.replayed == 0


async def test_another_conversation_is_a_branch_and_the_first_goes_on(stage: Stages) -> None:
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


@pytest.mark.second
async def test_a_half_grown_tree_goes_on_by_replay(stage: Stages) -> None:
    s = stage(adds, "counting")
    context = s.anew()
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


@pytest.mark.second
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
    stage: Stages, name: str, options: Any, outcome: float | None, crashed: float
) -> None:
    s = stage(lambda prompt, i: "r", name, **options)
    tree = await s.grow(chain)
    last = tree.actions()[-1]
    assert (last.scores.get("outcome"), last.scores["crashed"]) == (outcome, crashed)
    assert len(tree.actions()) == (3 if name == "endless" else 1)


async def test_an_agent_that_asks_nothing_is_a_fault_of_the_task(stage: Stages) -> None:
    with pytest.raises(DataFault, match=r"ended before it asked the policy .*nothing to ask"):
        await stage(lambda prompt, i: "r", "silent").grow(chain)


async def test_no_process_is_left(stage: Stages) -> None:
    s = stage(adds, "counting")
    await s.environment.open(s.environment.initial(s.task), s.anew().services)
    ((_, episode, _),) = s.environment._waiting
    await s.environment.close()
    assert episode._process is not None and episode._process.ended.result() == -9
    await asyncio.sleep(0)
