"""Agents written with the clients that people use, in real processes: their trees hold what was
sent and sampled, whatever each makes of its history."""

import asyncio
import importlib.util
import itertools
import json
from typing import Any

import pytest

from coppice.actors.environments.agents.gateway import Session
from coppice.scheduler.growth.strategies import chain, full
from coppice.scheduler.growth.tree import Tree
from tests.agent_stage import Stages, adds

pytestmark = pytest.mark.slow


def needs(package: str) -> None:
    """Skip a test whose client is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: expected the extra `agents`")


def is_one_path(tree: Tree, trajectory: int = 0) -> bool:
    """Whether every action of a trajectory has those before it above it."""
    actions = tree.actions(trajectory)
    return [node for node in tree.path(actions[-1]) if node.kind == "action"] == actions


CLIENTS = {
    "openai": "chat chat_streamed responses responses_streamed",
    "agents": "agents_streamed",
    "pydantic_ai": "pydantic_tool",
    "langchain_openai": "langgraph",
    "urllib": "messages",
}
FAITHFUL = {name: package for package, names in CLIENTS.items() for name in names.split()}


@pytest.mark.parametrize("name", FAITHFUL)
async def test_a_clients_conversation_is_one_path(stage: Stages, name: str) -> None:
    needs(FAITHFUL[name])
    s = stage(adds, f"tests.agent_clients:{name}")
    tree = await s.grow(full, k=2)
    s.check(tree)
    for trajectory in range(2):
        actions = tree.actions(trajectory)
        assert [action.scores["valid"] for action in actions] == [1, 1, 1]
        assert actions[-1].scores["outcome"] == 1.0, actions[-1].notes
        assert is_one_path(tree, trajectory)
        text = s.read(tree, actions[-1])
        assert text.count("1 + 2 + 4") == 1
        assert [text.count(f"<tool_response>\n{n}\n</tool_response>") for n in (3, 7)] == [1, 1]
    assert len(s.policy.samples) == 6


def smol(prompt: str, i: int) -> str:
    """Adds twice, then gives the answer with the tool for it."""
    done = prompt.count("\nObservation:\n")
    arguments = [{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"answer": "7"}][done]
    call = json.dumps({"name": "add" if done < 2 else "final_answer", "arguments": arguments})
    return f"I go on.\n<tool_call>{call}</tool_call>"


async def test_calls_written_as_text_are_a_branch_for_each_step_trained_once(stage: Stages) -> None:
    needs("smolagents")
    s = stage(smol, "tests.agent_clients:smol_tools")
    tree = await s.grow(full, k=2)
    s.check(tree)
    for trajectory in range(2):
        actions = tree.actions(trajectory)
        assert [action.scores["valid"] for action in actions] == [1] * 3
        assert actions[-1].scores["outcome"] == 1.0
        assert [tree.nodes[action.parent].parent for action in actions] == [0] * 3
        last = s.text.tokenizer.decode(tree.prefix(tree.nodes[actions[-1].parent]).tolist())
        assert "Observation:\n" in last and "Calling tools:" in last
    trained = [turn.node for turns in s.groups for turn in turns]
    sampled = [node.id for node in tree.nodes.values() if node.kind == "action"]
    assert sorted(trained) == sorted(sampled)


async def test_a_client_that_tries_again_gets_the_reply_that_was_sampled_for_its_first_try(
    stage: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("openai")
    tried, ask, numbers = asyncio.Event(), Session.ask, itertools.count(1)

    def noted(session: Session, conversation: Any, digest: str, again: bool) -> Any:
        if again:
            tried.set()
        return ask(session, conversation, digest, again)

    async def until_tried_again() -> None:
        await tried.wait()
        tried.clear()

    monkeypatch.setattr(Session, "ask", noted)
    s = stage(lambda prompt, i: f"reply {next(numbers)}", "tests.agent_clients:retried")
    s.policy.before = until_tried_again
    tree = await s.grow(chain)
    s.check(tree)
    assert len(s.policy.samples) == 2
    assert tree.actions()[-1].scores["outcome"] == 1.0


async def test_a_client_is_told_that_its_own_limit_has_cut_the_reply(stage: Stages) -> None:
    needs("openai")
    s = stage(lambda prompt, i: "one two three four five six " * 2, "tests.agent_clients:cut")
    tree = await s.grow(chain)
    s.check(tree)
    actions = tree.actions()
    assert actions[-1].scores["outcome"] == 1.0
    assert [len(action.tokens) for action in actions[:2]] == [5, 7]
    assert [action.finish for action in actions] == ["length", "length", "stop"]


@pytest.mark.parametrize(
    ("reply", "valid", "outcome"),
    [
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', [1, 0], 1.0),
        ("I would rather not.", [0, 0], 0.0),
    ],
)
async def test_a_required_call_that_is_not_made_is_an_invalid_action_which_the_client_receives(
    stage: Stages, reply: str, valid: list[float], outcome: float
) -> None:
    needs("openai")
    s = stage(lambda prompt, i: reply, "tests.agent_clients:required")
    tree = await s.grow(chain)
    s.check(tree)
    assert [action.scores["valid"] for action in tree.actions()] == valid
    assert tree.actions()[-1].scores["outcome"] == outcome
