"""Dynamic sampling: a question without spread is replaced."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from coppice.learner.update.table import TurnTable
from coppice.scheduler.config import EvaluationConfig
from coppice.scheduler.growth.dynamic_sampling import counted, differs
from coppice.wire import messages as wire
from tests.scheduler.test_begin import SETTINGS, House, journal_of


def turns(*trajectories: list[float | None]) -> list[wire.Turn]:
    """A group whose trajectories have these rewards turn by turn, None for no score."""
    return [
        wire.Turn(0, number, step, {} if reward is None else {"reward": reward})
        for number, rewards in enumerate(trajectories)
        for step, reward in enumerate(rewards, 1)
    ]


SPREADS = [
    (turns([0.0, 1.0], [1.0]), False, True),
    (turns([None, 1.0], [1.0]), False, True),
    (turns([0.0, 0.0], [0.0]), False, False),
    (turns([1.0], [0.0]), True, True),
    (turns([1.0], [None]), False, False),  # an unknown reward is no spread
    (turns([0.1, 0.2], [0.2, 0.1]), False, True),
    (turns([1.0, 1.0], [1.0, 1.0], [1.0, None]), False, True),  # a sum that lacks a turn is unknown
    ([], False, False),
]


@pytest.mark.parametrize(("group", "returns", "by_turn"), SPREADS)
def test_returns_or_for_some_schemes_turns_that_differ_are_a_spread(
    group: list[wire.Turn], returns: bool, by_turn: bool
) -> None:
    assert differs([group], "reward", "returns") == returns
    assert differs([turns([1.0], [1.0]), group], "reward", "turns") == by_turn


@pytest.mark.parametrize(("group", "returns"), [case[:2] for case in SPREADS if case[0]])
def test_the_learner_sees_the_same_spread_of_returns(group: list[wire.Turn], returns: bool) -> None:
    one, zero = np.ones(len(group), np.int64), np.zeros(len(group), np.int64)
    trajectory, turn = np.array([(each.trajectory, each.turn) for each in group]).T
    rewards = np.array([each.scores.get("reward", np.nan) for each in group])
    _, totals = TurnTable(zero, zero, trajectory, turn, one, {"reward": rewards}).returns("reward")
    assert (len({*totals[~np.isnan(totals)]}) > 1) == returns


def test_trees_of_one_question_are_compared_with_each_other_where_a_scheme_does() -> None:
    lost, won = turns([0.0], [0.0]), turns([1.0], [1.0])
    assert not differs([lost, won], "reward", "returns")
    assert differs([lost, won], "reward", "returns", across=True)
    assert not differs([won, won], "reward", "returns", across=True)


def test_equal_groups_are_counted_among_those_that_can_differ() -> None:
    counts = Counter[str]()
    for group in (turns([1.0], [1.0]), turns([1.0], [0.0]), turns([5.0])):
        counts.update(counted(group, "reward", "turns"))
    assert counts == {"compared_step_1": 2, "equal_step_1": 1}


async def test_as_many_questions_without_spread_as_the_budget_says_are_replaced(
    tmp_path: Path, llama: Path
) -> None:
    """A policy that knows no legal move loses every game."""
    options: Any = {"strategy": "full", "strategy_options": {"k": 2}, "updates": 1}
    options |= {"questions_per_update": 3, "dynamic_sampling_budget": 2}
    settings = replace(SETTINGS, evaluation=EvaluationConfig(questions=0), **options)
    house = House(tmp_path, llama, scheduler=settings, reward="outcome")
    house.waiting = [asyncio.Future() for _ in range(3)]  # no update comes
    await house.live(until=lambda house: len(house.run.journal.trees("status='closed'")) == 3)
    assert len(journal_of(tmp_path).trees("status='replaced'")) == 2
