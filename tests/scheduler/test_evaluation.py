"""What a held-out evaluation rests on: summaries of finished trees."""

from typing import Any

import numpy as np
import pytest

from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.tictactoe.environment import TicTacToe
from coppice.scheduler.evaluation.evaluation import estimate, pooled
from coppice.scheduler.growth.tree import Tree


def tree(*turns: dict[str, float], forced: bool = False) -> Tree:
    """A tree with one chosen action a turn, beside a sibling that was not chosen."""
    made, one = Tree(0, "t", "heldout"), np.zeros(1, np.int32)
    node = made.add(None, "prompt", one, "")
    for place, scores in enumerate(turns, 1):
        made.add(node, "action", one, "", scores={"outcome": 9.0, "reward": 9.0, "valid": 9.0})
        last = {"chosen": True, "forced": forced and place == len(turns)}
        node = made.add(node, "action", one, "", scores=dict(scores), **last)
    return made


def means(environment: Any, pairs: list[tuple[Task, Tree]]) -> dict[str, float]:
    return {name: estimate(of).mean for name, of in pooled(environment, pairs).items()}


def test_search_episodes_are_summed_up_by_question_and_by_action() -> None:
    one, two = Task("a", "?", ["x"], hops=1), Task("b", "?", ["y"], hops=2)
    answered = tree(
        {"reward": 1.0, "valid": 1.0, "query": 1.0},
        {"reward": 0.5, "valid": 1.0, "outcome": 1.0, "f1": 1.0},
    )
    used_up = tree(
        {"reward": -2.0, "valid": 0.0},
        {"reward": 0.5, "valid": 1.0, "query": 0.5},
        {"reward": 5.0, "valid": 1.0, "outcome": 0.0, "f1": 0.25},
        forced=True,
    )
    assert means(SearchQA("short"), [(one, answered), (two, used_up)]) == {
        "em": 0.5,
        "em_1_hop": 1.0,
        "em_2_hop": 0.0,
        "f1": 0.625,
        "return": 0.0,  # (1.5 - 1.5) / 2: a forced answer is no part of it
        "valid": 0.75,  # of four actions
        "answered": 0.5,
        "searches": 1.0,
        "turns": 2.0,
    }


def test_games_are_summed_up_by_episode_by_turn_by_side_and_by_opponent() -> None:
    opponents = {"random": 0.5, "tictactoe_minimax": 0.5}
    game = TicTacToe(prompt="tictactoe_compact", opponents=opponents)
    initial = [(game.initial(task), task) for task in map(game.task, range(40))]
    starts = {(state.me, state.opponent): task for state, task in initial}
    first, second = starts["X", "random"], starts["O", "tictactoe_minimax"]
    won = tree(
        {"valid": 1.0, "reward": 1.0},
        {"valid": 1.0, "reward": 0.0},
        {"valid": 1.0, "reward": 1.0, "outcome": 1.0, "success": 1.0, "draw": 0.0},
    )
    lost = tree({"valid": 0.0, "reward": 0.0, "outcome": -1.0, "success": 0.0, "draw": 0.0})
    drawn = tree({"valid": 1.0, "reward": 1.0, "outcome": 0.0, "success": 0.0, "draw": 1.0})
    assert means(game, [(first, won), (second, lost), (second, drawn), (first, won)]) == {
        "return": 0.25,
        "return_first": 1.0,
        "return_second": -0.5,
        "return_vs_random": 1.0,
        "return_vs_tictactoe_minimax": -0.5,
        "success": 0.5,
        "draw": 0.25,
        "turns": 2.0,
        "valid": 0.875,  # of eight turns
        "oracle": 0.625,
    }


def test_an_estimate_is_the_mean_with_its_95_percent_interval() -> None:
    assert estimate([1.0, 2.0, 3.0, 4.0]).mean == 2.5
    assert estimate([1.0, 2.0, 3.0, 4.0]).half == pytest.approx(1.96 * (5 / 3 / 4) ** 0.5)
    assert estimate([0.0, 1.0] * 50).half == pytest.approx(1.96 * (100 * 0.25 / 99 / 100) ** 0.5)
    # Agresti-Coull: ten of ten is 12 of 14, never a certainty
    assert estimate([1.0] * 10).half == pytest.approx(1.96 * (12 / 14 * 2 / 14 / 10) ** 0.5)
    assert estimate([]).mean != estimate([]).mean
