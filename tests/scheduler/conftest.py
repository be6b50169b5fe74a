"""The stage on which agents of a test module play."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.agent_stage import AGENT, TEMPLATE, Stage, Stages


@pytest.fixture
def agents(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's ``AGENTS`` can be imported as ``agents_of_a_test``."""
    text = AGENT + getattr(request.module, "AGENTS", "")
    (tmp_path / "agents_of_a_test.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")


@pytest_asyncio.fixture
async def stage(
    request: pytest.FixtureRequest, tmp_path: Path, llama: Path, agents: None
) -> AsyncIterator[Stages]:
    """Makes stages over the module's agents, with its ``CHAT``; ends what they have started."""
    chat, stages = getattr(request.module, "CHAT", TEMPLATE), list[Stage]()

    def make(reply: Callable[[str, int], str], name: str, **options: Any) -> Stage:
        stages.append(Stage(tmp_path, llama, reply, name, chat, **options))
        return stages[-1]

    yield make
    for one in stages:
        await one.environment.close()
        one.journal.close()
