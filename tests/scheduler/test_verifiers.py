"""verifiers as an agent: examples/verifiers_agent.py plays its episodes. COPPICE_VERIFIERS_PYTHON names a Python with verifiers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.environments.agents.environment import Agent
from actors.environments.base import Task
from scheduler.strategies import chain, slate
from scheduler.tree import Tree
from tests.scheduler.test_agents import Stage, stage  # noqa: F401 the fixture
from wire.faults import DataFault

ROOT = Path(__file__).parents[2]


@pytest.fixture
def python() -> str:
    """The Python in which verifiers is installed."""
    return os.environ.get("COPPICE_VERIFIERS_PYTHON") or pytest.skip("COPPICE_VERIFIERS_PYTHON names no Python")


def playing(staged: Stage, run: str, task: str) -> Stage:
    """Have a stage play a task with an agent of one's own."""
    staged.environment = Agent(run)
    staged.shop = msgspec.structs.replace(staged.shop, environment=staged.environment)
    staged.task = Task(task)
    staged.tree = Tree(1, task)
    staged.journal.start_tree(staged.tree, 0, 0)
    return staged


def answers(prompt: str, i: int) -> str:
    """Adds wrongly, and rightly when it is told so; the second of several candidates is right at once."""
    return "7" if "That is wrong." in prompt or i == 1 else "8"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-m examples.verifiers_agent", f"{ROOT}/examples/verifiers_agent.py"])
async def test_an_episode_of_verifiers_is_one_path_with_its_reward(
    stage: Callable[..., Stage],  # noqa: F811
    python: str,
    how: str,
) -> None:
    s = playing(stage(answers, "counting"), f"{python} {how}", "verifiers_adding/3")
    tree = await s.grow(chain)
    actions = tree.actions()
    assert [action.text for action in actions] == ["8", "7"]
    assert (actions[-1].scores["outcome"], actions[-1].scores["crashed"]) == (1.0, 0.0)
    assert "What is 3 + 4?" in s.policy.prompts[0] and s.policy.prompts[1].startswith(s.policy.prompts[0])


@pytest.mark.slow
async def test_a_strategy_chooses_among_candidates_for_verifiers(
    stage: Callable[..., Stage],  # noqa: F811
    python: str,
) -> None:
    s = playing(stage(answers, "counting"), f"{python} -m examples.verifiers_agent", "verifiers_adding/3")
    options: dict[str, Any] = {"k": 2, "selection": "best-of-k"}
    tree = await s.grow(slate, **options)
    assert [len(turns) for turns in s.groups] == [2] * len(tree.actions())
    assert tree.actions()[-1].scores["outcome"] == 1.0


@pytest.mark.slow
async def test_a_taskset_that_is_not_there_is_named(
    stage: Callable[..., Stage],  # noqa: F811
    python: str,
) -> None:
    with pytest.raises(DataFault, match="no_such_taskset"):
        await playing(stage(answers, "counting"), f"{python} -m examples.verifiers_agent", "no_such_taskset/3").grow(
            chain
        )
