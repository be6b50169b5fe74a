"""The Sokoban oracle."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.base import Action
from coppice.actors.environments.sokoban.environment import Sokoban, SokobanState
from coppice.judges.oracles.sokoban import SokobanOracle
from coppice.wire.messages import JudgedTurn
from tests import games

NOBODY: Any = None
ROOM = "######" + "#____#" + "#_PXO#" + "#____#" * 2 + "######"
"""One push to the right solves it; up and down lose a step; left loses a step."""
EDGE = "######" + "#_O__#" + "#____#" + "#_X__#" + "#_P__#" + "######"
"""Two pushes up solve it."""
RISK = "######" + "#____#" + "#_X__#" + "#_PO_#" + "#____#" + "######"
"""Up pushes the box to the wall, from which it never comes back."""


def judged(board: str, move: list[int] | None) -> JudgedTurn:
    plain = msgspec.to_builtins(SokobanState(board))
    return JudgedTurn("sokoban-1", [], "", "", 1, 15, state=plain, move=move)


def scores(turns: list[JudgedTurn], judge: SokobanOracle | None = None) -> list[dict[str, float]]:
    return games.scores(judge or SokobanOracle(), turns)


@pytest.mark.parametrize(
    ("board", "move", "graded", "best", "distance"),
    [
        (ROOM, [3], 1, 1, 1),
        (ROOM, [0], 0, 0, 1),
        (ROOM, [2], 0, 0, 1),
        (ROOM, None, -1, 0, 1),
        (EDGE, [0], 1, 1, 2),
        (EDGE, [1], 0, 0, 2),  # against the wall
        (RISK, [0], -1, 0, 6),
    ],
)
def test_steps_in_hand_made_rooms(
    board: str, move: list[int] | None, graded: float, best: float, distance: int
) -> None:
    (made,) = scores([judged(board, move)])
    assert (made["reward"], made["graded"], made["optimal"]) == (graded, graded, best)
    assert made["distance"] == distance
    (binary,) = scores([judged(board, move)], SokobanOracle("binary"))
    assert binary["reward"] == best


def test_a_lost_room_rewards_no_step_and_has_no_distance() -> None:
    lost = "######" + "#X___#" + "#_PO_#" + "#____#" * 2 + "######"
    for way in range(4):
        assert scores([judged(lost, [way])]) == [
            {"reward": 0, "graded": 0, "optimal": 0, "valid_share": 0}
        ]
    assert scores([judged(lost, None)])[0]["reward"] == -1


@pytest.mark.second
def test_following_the_oracle_solves_every_room_in_the_stated_number_of_steps() -> None:
    for seed in range(60):
        game, rng = Sokoban(boxes=1 + seed % 3), random.Random(seed)
        state, distances = game.initial(game.task(seed)), list[float]()
        ways = [Action("move", "", move=(way,)) for way in range(4)]
        while not state.over:
            turns = [game.judged(game.task(seed), state, action, 1, 4) for action in ways]
            made = scores(games.travelled(turns))
            share = sum(column["optimal"] for column in made) / 4
            assert {column["valid_share"] for column in made} == {share}
            distances.append(made[0]["distance"])
            way = rng.choice([way for way, column in enumerate(made) if column["optimal"]])
            state = asyncio.run(game.step(state, ways[way], NOBODY)).state
        assert distances == list(range(len(distances), 0, -1))
        assert game.lost(state)["success"] == 1


SOLVED = msgspec.to_builtins(SokobanState(ROOM.replace("PXO", "_P√")))


OPEN = {"board": "_" + ROOM[1:]}
"""Its border has a gap."""


@pytest.mark.parametrize("state", [None, {"board": "..."}, {"size": 4}, OPEN, SOLVED])
def test_a_turn_of_another_environment_or_of_a_solved_room_is_a_data_fault(state: Any) -> None:
    assert games.refused(SokobanOracle(), state)
