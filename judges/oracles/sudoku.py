"""The Sudoku oracle: it judges whether a digit is the digit of the unique solution (methods.md
3.3)."""

from typing import Literal

import msgspec

from coppice.actors.environments.sudoku import environment as game
from coppice.judges.base import Oracle
from coppice.wire.messages import JudgedTurn, Judgement


class SudokuOracle(Oracle):
    """reward: what the column "reward" is, "binary" (the paper: 1 for the solution's digit in a
    blank cell, else 0) or "graded" (v2, see ``graded``).

    valid_share: the chance that a uniformly random legal move is right, which is 1 / size in every
    state.
    """

    name = "sudoku"
    environments = ("sudoku",)
    columns = ("reward", "graded", "valid_share")
    limits = (-2.0, 2.0)

    def __init__(self, reward: Literal["binary", "graded"] = "binary"):
        self.reward = reward

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        state, move = msgspec.convert(turn.state, game.SudokuState), tuple(turn.move or ())
        cell = move[0] * state.size + move[1] if move in game.legal_moves(state) else None
        right = cell is not None and state.solution[cell] == str(move[2])
        value, why = graded(state, cell, right, last=state.turn + 1 >= turn.budget)
        reward = float(right) if self.reward == "binary" else value
        scores = {"reward": reward, "graded": value, "valid_share": 1 / state.size}
        return Judgement(scores, explanation=why)


def graded(state: game.SudokuState, cell: int | None, right: bool, last: bool) -> tuple[float, str]:
    """Return the graded value of a move and the reason. cell: None unless the move is legal.

    2, 1 or 0.5 for the right digit in a cell with one candidate, with the fewest candidates, or
    with more; -1 for a wrong digit; -2 without a usable cell and for running out of turns
    (methods.md 3.3). As in the v2 code, running out of turns replaces the value of the last move,
    right or wrong. (Unlike here, the v2 code keeps -1 on the last turn for a wrong digit that ends
    the episode.)
    """
    if cell is None:
        return -2.0, "no digit for a blank cell"
    if last and not (right and state.board.count(game.BLANK) == 1):
        return -2.0, f"out of turns; the digit was {'right' if right else 'wrong'}"
    if not right:
        return -1.0, "wrong digit"
    counts = game.candidates(state.board)
    own, fewest = counts[cell], min(counts.values())
    value = 2.0 if own == 1 else 1.0 if own == fewest else 0.5
    return value, f"right digit, {own} candidates, the fewest are {fewest}"
