"""The frozen lake of docs/replication/trees.md: its rules and exact chances are gymnasium's."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest

from coppice.actors.environments.base import HELD_OUT_SEEDS
from coppice.research import lake
from coppice.wire.messages import JudgedTurn


def _gymnasium(state: lake.LakeState) -> Any:
    size = int(len(state.lake) ** 0.5)
    rows = [state.lake[at : at + size] for at in range(0, len(state.lake), size)]
    made = gymnasium.make("FrozenLake-v1", desc=rows, success_rate=state.steady)
    return made.unwrapped


@pytest.mark.parametrize(("size", "steady", "turns"), [(4, 1.0, 7), (4, 0.9, 12), (8, 0.7, 24)])
def test_chances_are_those_of_gymnasiums_table(size: int, steady: float, turns: int) -> None:
    """Backward induction over gymnasium's own transitions, cell by cell and step by step."""
    game = lake.Lake(size, steady, turns)
    for seed in range(5):
        state = game.initial(game.task(seed))
        table = _gymnasium(state).P
        later = np.zeros(size * size)
        for left in range(1, turns + 1):
            steps = np.array([
                [
                    sum(chance * (reward + (not end) * later[cell])
                        for chance, cell, reward, end in table[place][way])
                    for way in range(4)
                ]
                for place in range(size * size)
            ])  # fmt: skip
            open_cells = [place for place, cell in enumerate(state.lake) if cell in "SF"]
            for place in open_cells:
                there = msgspec.structs.replace(state, place=place, turn=turns - left)
                np.testing.assert_allclose(lake.arrivals(there), steps[place], atol=1e-12)
            later = np.where([c in "SF" for c in state.lake], steps.max(1), 0.0)


def test_a_step_slides_to_either_side_and_a_hole_or_the_goal_ends_it() -> None:
    game = lake.Lake(4, 0.5, 9)
    state = lake.LakeState("SFFFFFFFFFFFFFHG", 9, 0, 0.5, 9)
    reached = {}
    for draw in (0.0, 0.5, 0.8):
        tools: Any = SimpleNamespace(rng=SimpleNamespace(random=lambda draw=draw: draw))
        reached[draw] = asyncio.run(game.apply(state, (1,), tools)).state.place
    assert reached == {0.0: 13, 0.5: 10, 0.8: 8}  # down, then right and left of it

    def end(place: int, way: int, turn: int = 0) -> tuple[bool, float | None]:
        tools: Any = SimpleNamespace(rng=SimpleNamespace(random=lambda: 0.0))
        there = msgspec.structs.replace(state, place=place, turn=turn)
        transition = asyncio.run(game.apply(there, (way,), tools))
        return transition.done, transition.outcome

    assert end(13, 2) == (True, 0.0)  # a hole
    assert end(11, 1) == (True, 1.0)  # the goal
    assert end(0, 0) == (False, None)  # the edge
    assert end(0, 0, turn=8) == (True, 0.0)  # the last turn


def test_the_oracle_scores_by_the_turns_left() -> None:
    """A step away from the goal is the best where the direct one is too late anyway."""
    state = lake.LakeState("SFFFFFFFFFFFFFFG", 14, 8, 1.0, 9)
    oracle = lake.LakeOracle()

    def score(state: lake.LakeState, way: int | None) -> dict[str, float]:
        plain, move = msgspec.to_builtins(state), None if way is None else [way]
        turn = JudgedTurn("lake-1", [], "", "", 1, 9, state=plain, move=move)
        return dict(oracle.judge_state(turn).scores)

    assert score(state, 2)["reward"] == score(state, 2)["chance"] == 1
    assert score(state, 0)["reward"] == 0 and score(state, 0)["lead"] == -1
    assert score(state, None)["reward"] == 0
    far = msgspec.structs.replace(state, place=0)
    assert score(far, 0)["valid_share"] == 1 and score(far, 0)["best"] == 0


def test_held_out_maps_are_no_training_maps() -> None:
    game = lake.Lake(6)
    seeds = random.Random(0).sample(range(10_000), 200)
    trained = {game.initial(game.task(seed)).lake for seed in seeds}
    held = {game.initial(game.task(HELD_OUT_SEEDS[n])).lake for n in range(200)}
    assert len(held) > 100 and not trained & held
