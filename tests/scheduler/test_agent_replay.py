"""Agents that are brought back to an earlier turn, and what they may ask beside the policy:
continuations, dropped branches, lost processes, the retriever, and what a judge sees of their
replies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coppice.actors.environments.agents import environment
from coppice.actors.environments.base import Task
from coppice.common import loop
from coppice.scheduler.growth.scoring import finish
from coppice.scheduler.growth.strategies import chain, full, mc_value
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, JudgeRequest, Passage, RetrieveRequest, RetrieveResult
from tests.agent_stage import Stage, Stages, adds

AGENTS = '''
import random
CALLS = 0

def drawing(task):
    """Draws random numbers, and counts the calls of its module."""
    global CALLS
    CALLS += 1
    reply = call([user(f"{random.random()} {CALLS}")])
    call([user("again"), reply, user(str(random.random()))])
    return 0.5

def changing(task):
    call([user(str(os.getpid()))])
    call([user("again")])
    return 1.0

def impatient(task):
    import time
    while True:
        threading.Thread(target=call, args=([user(str(time.time()))],), daemon=True).start()
        time.sleep(0.05)

def importing(task):
    import sys
    known = f"late {'colorsys' in sys.modules} own {'own_module' in sys.modules}"
    import colorsys, own_module
    call([user(known)])

def slow(task):
    import time
    messages = [user("one")]
    messages += [call(messages), user("two")]
    time.sleep(float(task["question"]))
    call(messages)
    return 1.0

def searching(task):
    messages = [user(task["question"])]
    while (reply := call(messages, "search")).get("tool_calls"):
        (one,) = reply["tool_calls"]
        query = json.loads(one["function"]["arguments"])["query"]
        ((passage,),) = post("/retrieve", {"queries": [query], "topk": 1})["result"]
        result = {"role": "tool", "tool_call_id": one["id"], "content": passage["contents"]}
        messages += [reply, result]
'''


async def test_monte_carlo_values_of_an_agent(stage: Stages) -> None:
    s = stage(adds, "counting")
    tree = await s.grow(mc_value, continuations=4)
    values = [action.scores["mc_value"] for action in tree.actions()]
    assert values[-1] == 0.25, "of four last replies one is right"
    assert s.environment.replayed > 0
    assert all(prompt.startswith(s.policy.prompts[0]) for prompt in s.policy.prompts)


async def test_random_numbers_and_modules_are_an_episodes_own(stage: Stages) -> None:
    s = stage(lambda prompt, i: "r", "drawing")
    tree = await s.grow(mc_value, continuations=3)
    assert [action.scores["mc_value"] for action in tree.actions()] == [0.5, 0.5]
    assert s.counts["dropped_branches"] == 0


@pytest.mark.second
@pytest.mark.usefixtures("agents")
def test_many_episodes_on_the_loop_of_a_run_leave_no_file_open(tmp_path: Path, llama: Path) -> None:
    async def play() -> list[int]:
        s, files = Stage(tmp_path, llama, adds, "counting"), list[int]()
        for number in range(1, 5):
            tree = Tree(number, s.task.id)
            s.journal.start_tree(tree, number, 0)
            await s.grow(full, tree, k=4)
            await asyncio.gather(*s.environment._closing)
            await asyncio.sleep(0.1)
            files.append(len(os.listdir("/proc/self/fd")))
        await s.environment.close()
        s.journal.close()
        return files

    files = loop.run(play())
    assert files[-1] <= files[0] + 1, files


@pytest.mark.parametrize(("agent", "patience"), [("changing", 0.0), ("impatient", 0.5)])
async def test_an_episode_that_cannot_be_reached_again_is_dropped_and_its_task_stays(
    stage: Stages, monkeypatch: pytest.MonkeyPatch, agent: str, patience: float
) -> None:
    monkeypatch.setattr(environment, "PATIENCE_S", patience)
    s = stage(lambda prompt, i: "r", agent, kept=1)
    ctx = s.anew()
    await ctx.plant()
    (action,) = await ctx.generate(await ctx.tip(), 1)
    action.chosen = True
    await s.environment.open(s.environment.initial(s.task), ctx.services)  # ends the first one
    assert await ctx.step(action) is None
    assert action.invalid == ["outcome"] and "asks something else" in action.notes["dropped"]
    assert not await finish(ctx)
    assert s.counts["dropped_branches"] == 1
    assert await ctx.step(action) is None, "a resumed tree does not try again"


async def test_values_without_a_single_continuation_are_a_fault_of_the_task(
    stage: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "PATIENCE_S", 0.0)
    s = stage(lambda prompt, i: "r", "changing")
    with pytest.raises(DataFault, match="no continuation of an action has an outcome"):
        await s.grow(mc_value, continuations=3)
    assert s.counts["dropped_branches"] >= 3


async def test_a_lost_fork_server_costs_no_episode_and_another_is_opened(stage: Stages) -> None:
    s = stage(adds, "counting")
    ctx = s.anew()
    await ctx.plant()
    (action,) = await ctx.generate(await ctx.tip(), 1)
    action.chosen = True
    server = s.environment.fork_server._server
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    while not s.environment._waiting[0][1].over:
        await asyncio.sleep(0.01)
    assert await ctx.step(action) is not None
    assert s.environment.fork_server._server is not server


def looks(prompt: str, i: int) -> str:
    if "Capital" in prompt:
        return "<think> I know it. </think> Lima"
    call = '{"name": "search", "arguments": {"query": "Peru capital"}}'
    return f"<think> I look. </think> <tool_call>{call}</tool_call>"


async def test_an_agent_asks_the_retriever_and_a_judge_sees_it(stage: Stages) -> None:
    s = stage(looks, "searching", retriever=True, outcome_judge="any")
    turns, policy = list[JudgedTurn](), s.policy.call

    async def call(service: str, request: Any, **more: Any) -> Any:
        if isinstance(request, RetrieveRequest):
            (query,) = request.queries
            return RetrieveResult([[Passage("p", "Peru", f"Capital: {query}?", 1.0)]])
        turns.extend(request.turns if isinstance(request, JudgeRequest) else [])
        return await policy(service, request, **more)

    s.policy.call = call
    tree = await s.grow(chain)
    assert [action.scores["valid"] for action in tree.actions()] == [1.0, 1.0]
    first, last = {turn.step: turn for turn in turns}.values()
    assert (first.think, first.query, first.answer) == ("I look.", "Peru capital", None)
    assert (last.think, last.query, last.answer) == ("I know it.", None, "Lima")
    assert last.past_queries == ["Peru capital"] and "Peru capital" in last.context
    (seen,) = last.past_observations
    assert '"Peru"\nCapital: Peru capital?' in seen


async def test_calls_in_special_tokens_are_read(tmp_path: Path, stage: Stages) -> None:
    s = stage(lambda prompt, i: "7", "counting", family="mistral")
    tokenizer = s.text.tokenizer
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<|eot|>"])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    text = Text(str(tmp_path / "model"), s.environment.marks)
    tokens = text.encode('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]<|eot|></s>')
    assert text.decode(tokens) == '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    assert "[TOOL_CALLS]" not in Text(str(tmp_path / "model")).decode(tokens)


async def test_late_imports_of_libraries_are_shared(tmp_path: Path, stage: Stages) -> None:
    (tmp_path / "own_module.py").write_text("")
    s, said = stage(lambda prompt, i: "r", "importing"), [""]
    async with asyncio.timeout(60):
        while "late True" not in said[-1]:
            tree = Tree(len(said), s.task.id)
            s.journal.start_tree(tree, tree.id, 0)
            await s.grow(chain, tree)
            said.append(s.policy.prompts[-1])
            await asyncio.gather(*s.environment._closing)
            await asyncio.sleep(0.05)
    assert "late False own False" in said[1]
    assert "late True own False" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "seconds", "wait", "outcome"), [("0", 3.0, 3.1, 1.0), ("300", 1.5, 0.0, 0.0)]
)
async def test_waiting_for_a_reply_is_not_the_agents_time(
    stage: Stages, question: str, seconds: float, wait: float, outcome: float
) -> None:
    s = stage(lambda prompt, i: "r", "slow", seconds=seconds)
    s.task = Task("t", question)
    waits = iter([wait])  # before the first reply alone
    s.policy.before = lambda: asyncio.sleep(next(waits, 0.0))
    tree = await s.grow(chain)
    assert tree.actions()[-1].scores["outcome"] == outcome
