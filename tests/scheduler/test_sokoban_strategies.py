"""Sokoban under the real strategies: full trajectories, and chains with the oracle."""

import random
from pathlib import Path
from typing import Any

import pytest

from coppice.actors.environments.registry import load
from coppice.judges.oracles.sokoban import SokobanOracle
from coppice.scheduler.growth.strategies import full
from tests.scheduler.test_game_strategies import Services, Stage


def stage(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Stage:
    """A stage whose policy writes random words, one of five of which is not an action."""
    rng = random.Random(4)
    words = [f"<action>{word}</action>" for word in ("up", "down", "left", "right", "jump")]
    monkeypatch.setattr(Services, "_move", lambda self, prompt: rng.choice(words))
    game: Any = load("sokoban", {"prompt": "sokoban_compact", "history": 0})
    made = Stage(tmp_path, llama, game, **settings)
    made.services.oracle = SokobanOracle()  # pyright: ignore[reportAttributeAccessIssue]
    return made


async def test_full_trajectories_have_step_rewards_and_situations_that_recur(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = stage(tmp_path, llama, monkeypatch, k=4, judge="none")
    await its.grow(full)
    (turns,) = its.groups
    for number in range(4):
        scores = [turn.scores for turn in turns if turn.trajectory == number]
        assert scores[-1]["outcome"] == pytest.approx(sum(score["step_reward"] for score in scores))
        assert [("outcome" in score) for score in scores] == [False] * (len(scores) - 1) + [True]
        assert len(scores) == 15 or scores[-1]["success"] == 1
    assert 0 < sum(turn.scores["valid"] == 0 for turn in turns) < len(turns) / 2
    assert len({turn.anchor for turn in turns}) < len(turns) / 2
    first = [turn.anchor for turn in turns if turn.turn == 1]
    assert len(first) == 4 and len(set(first)) == 1
