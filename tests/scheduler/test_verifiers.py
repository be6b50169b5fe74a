"""verifiers as an agent: examples/verifiers_agent.py plays its episodes. COPPICE_VERIFIERS_PYTHON
names a Python with verifiers, and COPPICE_VERIFIERS_ENVIRONMENTS the folder ``environments`` of a
checkout of its repository, whose published environments are no part of its package.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from coppice.actors.environments.agents.environment import AgentEnvironment
from coppice.actors.environments.base import Task
from coppice.scheduler.growth.strategies import chain, slate
from coppice.scheduler.growth.tree import Tree
from tests.agent_stage import Stage, Stages
from tests.scheduler.test_agents import AGENTS  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture
def python() -> str:
    """The Python in which verifiers is installed."""
    return os.environ.get("COPPICE_VERIFIERS_PYTHON") or pytest.skip(
        "COPPICE_VERIFIERS_PYTHON names no Python"
    )


@pytest.fixture
def published(python: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that plays the published environments without uv."""
    folder = os.environ.get("COPPICE_VERIFIERS_ENVIRONMENTS")
    names = ("kuhn_poker", "glossary")
    missing = [name for name in names if not (Path(folder or "") / name / name).is_dir()]
    if not folder or missing:
        pytest.skip(f"COPPICE_VERIFIERS_ENVIRONMENTS={folder} has no {' and no '.join(missing)}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{folder}/kuhn_poker:{folder}/glossary")
    return f"{python} -m examples.verifiers_agent --harness verifiers_chat"


def playing(staged: Stage, run: str, task: str) -> Stage:
    """Have a stage play a task with an agent of one's own."""
    staged.environment = AgentEnvironment(run)
    staged.runtime = msgspec.structs.replace(staged.runtime, environment=staged.environment)
    staged.task = Task(task)
    staged.tree = Tree(1, task)
    staged.journal.start_tree(staged.tree, 0, 0)
    return staged


def answers(prompt: str, i: int) -> str:
    """Adds wrongly, and rightly when it is told so; the second of several candidates is right at
    once."""
    return "7" if "That is wrong." in prompt or i == 1 else "8"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["-m examples.verifiers_agent", f"{ROOT}/examples/verifiers_agent.py"]
)
async def test_an_episode_of_verifiers_is_one_path(stage: Stages, python: str, how: str) -> None:
    s = playing(stage(answers, "counting"), f"{python} {how}", "verifiers_adding/3")
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [action.text for action in actions] == ["8", "7"]
    assert (actions[-1].scores["outcome"], actions[-1].scores["crashed"]) == (1.0, 0.0)
    assert "What is 3 + 4?" in s.policy.prompts[0] and s.policy.prompts[1].startswith(
        s.policy.prompts[0]
    )


def bets(prompt: str, i: int) -> str:
    """Checks first, bets after a check, and calls a bet."""
    legal = prompt.rpartition("Your legal actions:")[2]
    if "[call]" in legal:
        return "[call]"
    return "[bet]" if "chose [check]" in prompt.rpartition("Betting so far:")[2] else "[check]"


def won(first: str, second: str) -> float:
    """What the first of two players of Kuhn poker earns who has called a bet, by the cards that
    their prompts show."""
    cards = [re.findall(r"Your private card: ([JQK])", prompt)[-1] for prompt in (first, second)]
    return 2.0 if "JQK".index(cards[0]) > "JQK".index(cards[1]) else -2.0


@pytest.mark.slow
async def test_two_players_of_a_game_have_a_path_each(stage: Stages, published: str) -> None:
    s = playing(stage(bets, "counting"), f"{published} --learns player0,player1", "kuhn_poker/3")
    tree = await s.grow(chain)
    s.check(tree)
    actions = tree.actions()
    assert [action.text for action in actions] == ["[check]", "[bet]", "[call]"]
    paths = [[node.id for node in tree.path(action) if node.kind == "action"] for action in actions]
    assert paths == [[actions[0].id], [actions[1].id], [actions[0].id, actions[2].id]]
    assert "as Player 0" in s.policy.prompts[2] and s.policy.prompts[2].startswith(
        s.policy.prompts[0]
    )
    assert actions[-1].scores["outcome"] == won(*s.policy.prompts[:2])
    assert actions[-1].scores["crashed"] == 0.0


@pytest.mark.slow
async def test_a_player_that_does_not_learn_is_in_no_tree(stage: Stages, published: str) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.headers["Authorization"], await request.json()))
        message = {"role": "assistant", "content": "[bet]"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "start"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        run = f"{published} --learns player0 --others {url} start"
        s = playing(stage(bets, "counting"), run, "kuhn_poker/4")
        tree = await s.grow(chain)
    finally:
        await runner.cleanup()
    s.check(tree)
    actions = tree.actions()
    assert [action.text for action in actions] == ["[check]", "[call]"]
    assert [node for node in tree.path(actions[1]) if node.kind == "action"] == actions
    ((key, body),) = asked
    assert (key, body["model"]) == ("Bearer none", "start")
    assert actions[-1].scores["outcome"] == won(s.policy.prompts[0], body["messages"][0]["content"])


@pytest.mark.slow
async def test_a_published_tool_is_called_over_mcp(stage: Stages, published: str) -> None:
    def looks_up(prompt: str, i: int) -> str:
        name = re.findall(r'look up "([^"]+)"', prompt)[-1]
        seen = prompt.partition("<tool_response>\n")[2]
        if not seen:
            call = json.dumps({"name": "facts_lookup", "arguments": {"name": name}})
            return f"<tool_call>\n{call}\n</tool_call>"
        return f"<answer>{seen.partition(chr(10) + '</tool_response>')[0]}</answer>"

    s = playing(stage(looks_up, "counting"), published, "glossary/2")
    tree = await s.grow(slate, k=2, selection="best-of-k")
    s.check(tree)
    actions = tree.actions()
    assert [action.scores["valid"] for action in actions] == [1, 1]
    assert [node for node in tree.path(actions[1]) if node.kind == "action"] == actions
    assert (actions[-1].scores["outcome"], actions[-1].scores["crashed"]) == (1.0, 0.0)
    assert '"name": "facts_lookup"' in s.policy.prompts[0] and "Look up what" in s.policy.prompts[0]
