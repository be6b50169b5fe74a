"""verifiers as an agent: examples/verifiers_agent.py plays its episodes. COPPICE_VERIFIERS_PYTHON
names a Python with verifiers, and COPPICE_VERIFIERS_ENVIRONMENTS the folder ``environments`` of a
checkout of its repository, whose published environments are no part of its package.
"""

import os
import re
from pathlib import Path

import msgspec
import pytest

from coppice.actors.environments.agents.environment import AgentEnvironment
from coppice.actors.environments.base import Task
from coppice.scheduler.growth.strategies import chain
from tests.agent_stage import Stage, Stages

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
    if not (Path(folder or "") / "kuhn_poker" / "kuhn_poker").is_dir():
        pytest.skip(f"COPPICE_VERIFIERS_ENVIRONMENTS={folder} has no kuhn_poker")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{folder}/kuhn_poker")
    return f"{python} -m examples.verifiers_agent --harness verifiers_chat"


def playing(staged: Stage, run: str, task: str) -> Stage:
    """Have a stage play a task with an agent of one's own."""
    staged.environment, staged.task = AgentEnvironment(run), Task(task)
    staged.runtime = msgspec.structs.replace(staged.runtime, environment=staged.environment)
    return staged


def answers(prompt: str, i: int) -> str:
    """Adds wrongly, and rightly when it is told so; the second of several candidates is right at
    once."""
    return "7" if "That is wrong." in prompt or i == 1 else "8"


@pytest.mark.slow
async def test_an_episode_of_verifiers_is_one_path(
    stage: Stages, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "tasksets"))
    s = playing(
        stage(answers, "counting"), f"{python} {ROOT}/examples/verifiers_agent.py", "adding/3"
    )
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [action.text for action in actions] == ["8", "7"]
    assert (actions[-1].scores["outcome"], actions[-1].scores["crashed"]) == (1.0, 0.0)
    first, second = s.policy.prompts
    assert "What is 3 + 4?" in first and second.startswith(first)


def bets(prompt: str, i: int) -> str:
    """Checks first, bets after a check, and calls a bet."""
    if "[call]" in prompt.rpartition("Your legal actions:")[2]:
        return "[call]"
    return "[bet]" if "chose [check]" in prompt.rpartition("Betting so far:")[2] else "[check]"


@pytest.mark.slow
async def test_two_players_of_a_game_have_a_path_each(stage: Stages, published: str) -> None:
    s = playing(stage(bets, "counting"), f"{published} --learns player0,player1", "kuhn_poker/3")
    tree = await s.grow(chain)
    s.check(tree)
    actions = tree.actions()
    assert [action.text for action in actions] == ["[check]", "[bet]", "[call]"]
    paths = [[node.id for node in tree.path(action) if node.kind == "action"] for action in actions]
    assert paths == [[actions[0].id], [actions[1].id], [actions[0].id, actions[2].id]]
    first, second, third = s.policy.prompts
    assert "as Player 0" in third and third.startswith(first)
    own, other = (re.findall(r"private card: ([JQK])", each)[-1] for each in (first, second))
    won = 2.0 if "JQK".index(own) > "JQK".index(other) else -2.0  # with a bet that is called
    assert (actions[-1].scores["outcome"], actions[-1].scores["crashed"]) == (won, 0.0)
