"""Sokoban under the real strategies: full trajectories, chains with the oracle, Monte Carlo values."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.registry import load
from coppice.actors.environments.sokoban.environment import State
from coppice.judges.oracles.sokoban import SokobanOracle
from coppice.scheduler.evaluation.evaluation import summarise
from coppice.scheduler.growth.strategies import chain, full, mc_value
from tests.scheduler.test_game_strategies import Services, Stage


def stage(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Stage:
    """A stage whose policy writes random words, one of five of which is not an action."""
    rng = random.Random(4)
    words = ("up", "down", "left", "right", "jump")
    monkeypatch.setattr(
        Services, "_move", lambda self, prompt: f"<action>{rng.choice(words)}</action>"
    )
    game: Any = load("sokoban", {"prompt": "sokoban_compact", "history": 0})
    made = Stage(tmp_path, llama, game, **settings)
    made.services.oracle = SokobanOracle()  # pyright: ignore[reportAttributeAccessIssue]
    return made


async def test_full_trajectories_have_step_rewards_that_sum_to_the_outcome_and_situations_that_recur(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = stage(tmp_path, llama, monkeypatch, k=4, judge="none")
    await its.grow(full)
    (turns,) = its.groups
    by_trajectory = [
        [turn.scores for turn in turns if turn.trajectory == number] for number in range(4)
    ]
    for scores in by_trajectory:
        assert scores[-1]["outcome"] == pytest.approx(sum(score["step_reward"] for score in scores))
        assert [("outcome" in score) for score in scores] == [False] * (len(scores) - 1) + [True]
        assert len(scores) == 15 or scores[-1]["success"] == 1
    assert 0 < sum(turn.scores["valid"] == 0 for turn in turns) < len(turns) / 2
    assert len({turn.anchor for turn in turns}) < len(turns) / 2
    first = [turn.anchor for turn in turns if turn.turn == 1]
    assert len(first) == 4 and len(set(first)) == 1


async def test_a_chain_is_judged_by_the_oracle_and_ends_with_the_shown_room(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = stage(tmp_path, llama, monkeypatch)
    await its.grow(chain)
    (turns,) = its.groups
    assert all({"reward", "optimal", "valid_share"} <= set(turn.scores) for turn in turns)
    assert all(turn.scores["reward"] == -1 for turn in turns if turn.scores["valid"] == 0)
    last = its.reread().nodes[max(its.reread().nodes)]
    assert last.kind == "observation"
    assert last.text.splitlines()[0] == "# # # # # #"


async def test_a_run_without_a_judge_has_no_measure_of_the_oracle(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = stage(tmp_path, llama, monkeypatch, judge="none")
    await its.grow(chain)
    result = summarise(0, its.shop.environment, [(its.task, its.tree)])
    assert set(result.measures) == {"completion", "return", "success", "turns", "valid"}


async def test_monte_carlo_values_of_every_position(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = stage(tmp_path, llama, monkeypatch, continuations=3, judge="none")
    await its.grow(mc_value)
    (turns,) = its.groups
    assert all(-1.5 - 1e-9 <= turn.scores["mc_value"] <= 11 for turn in turns)
    prompts = [node for node in its.tree.nodes.values() if node.kind == "prompt"]
    assert [msgspec.convert(node.state, State).turn for node in prompts[1:]] == list(
        range(len(turns))
    )
