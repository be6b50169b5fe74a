"""Agents written with the clients that people use, in real processes: their trees hold what was
sent and sampled, whatever each makes of its history."""

import importlib.util
import json

import pytest

from coppice.scheduler.growth.strategies import chain
from tests.agent_stage import Stages, adds

pytestmark = pytest.mark.slow


def needs(package: str) -> None:
    """Skip a test whose client is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: expected the extra `agents`")


CLIENTS = {
    "openai": "chat_streamed",
    "agents": "agents_streamed",
    "pydantic_ai": "pydantic_tool",
    "langchain_openai": "langgraph",
    "urllib": "messages",
}


@pytest.mark.parametrize(("package", "name"), CLIENTS.items())
async def test_a_clients_conversation_is_one_path(stage: Stages, package: str, name: str) -> None:
    needs(package)
    s = stage(adds, f"tests.agent_clients:{name}")
    tree = await s.grow(chain)
    s.check(tree)
    actions = tree.actions()
    assert [action.scores["valid"] for action in actions] == [1, 1, 1]
    assert actions[-1].scores["outcome"] == 1.0, actions[-1].notes
    assert [node for node in tree.path(actions[-1]) if node.kind == "action"] == actions
    text = s.read(tree, actions[-1])
    assert text.count("1 + 2 + 4") == 1
    assert [text.count(f"<tool_response>\n{n}\n</tool_response>") for n in (3, 7)] == [1, 1]


def smol(prompt: str, i: int) -> str:
    """Adds twice, then gives the answer with the tool for it."""
    done = prompt.count("\nObservation:\n")
    arguments = [{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"answer": "7"}][done]
    call = json.dumps({"name": "add" if done < 2 else "final_answer", "arguments": arguments})
    return f"I go on.\n<tool_call>{call}</tool_call>"


async def test_calls_written_as_text_are_a_branch_for_each_step_trained_once(stage: Stages) -> None:
    needs("smolagents")
    s = stage(smol, "tests.agent_clients:smol_tools")
    tree = await s.grow(chain)
    s.check(tree)
    actions = tree.actions()
    assert [action.scores["valid"] for action in actions] == [1] * 3
    assert actions[-1].scores["outcome"] == 1.0
    assert [tree.nodes[action.parent].parent for action in actions] == [0] * 3
    last = s.text.tokenizer.decode(tree.prefix(tree.nodes[actions[-1].parent]).tolist())
    assert "Observation:\n" in last and "Calling tools:" in last
    trained = [turn.node for turns in s.groups for turn in turns]
    assert trained == [action.id for action in actions]
