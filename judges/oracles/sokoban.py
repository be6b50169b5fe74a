"""The Sokoban oracle: it judges whether a step lies on a shortest solution, by the exact distances
of the room (VPR's turn reward, methods.md 3)."""

from typing import Literal

import msgspec

from coppice.actors.environments.sokoban.environment import WORDS, SokobanState
from coppice.actors.environments.sokoban.rooms import Room, optimal, parse, pushed, shortest
from coppice.judges.base import Oracle
from coppice.wire.messages import JudgedTurn, Judgement


class SokobanOracle(Oracle):
    """reward: what the column "reward" is, "binary" (as in VPR: 1 for a step of a shortest
    solution, else 0, the column "optimal") or "graded" (see ``graded``).

    distance: the length of a shortest solution before the step, absent if there is none any more.
    valid_share: the chance that a uniformly random step is optimal. In a position without a
    solution no step is optimal.
    """

    name = "sokoban"
    environments = ("sokoban",)
    columns = ("reward", "optimal", "graded", "distance", "valid_share")
    concurrency = 64
    batch = 64
    threaded = True

    def __init__(self, reward: Literal["binary", "graded"] = "graded"):
        self.reward = reward

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        position = parse(msgspec.convert(turn.state, SokobanState).board)
        if position.solved:
            raise ValueError("the room is solved, so no step follows")
        best, direction = optimal(position), None if turn.move is None else turn.move[0]
        value, why = graded(position, direction)
        right = float(direction in best)
        scores = {
            "reward": value if self.reward == "graded" else right,
            "optimal": right,
            "graded": value,
            "valid_share": len(best) / len(WORDS),
        }
        if (distance := shortest(position)) is not None:
            scores["distance"] = float(distance)
        return Judgement(scores, explanation=why)


def graded(position: Room, direction: int | None) -> tuple[float, str]:
    """Return the graded value of a step and the reason. direction: None for a reply that cannot be
    read.

    1 for a step of a shortest solution, 0 for any other, -1 for a reply that cannot be read and for
    the step that loses the last solution. Where no solution was left before the step, every
    readable step has 0.
    """
    if direction is None:
        return -1.0, "no readable step"
    before = shortest(position)
    if before is None:
        return 0.0, "the room could not be solved any more"
    after = shortest(pushed(position, direction))
    if after is None:
        return -1.0, f"loses the last solution, which had {before} steps"
    change = f"{before} steps from the solution before, {after} after"
    return (1.0 if after == before - 1 else 0.0), change
