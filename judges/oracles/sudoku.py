"""The Sudoku oracle: it judges whether a digit is the digit of the unique solution (methods.md
3.3)."""

from typing import Literal

import msgspec

from coppice.actors.environments.sudoku.environment import BLANK, State, candidates, cell_of
from coppice.judges.base import RuleJudge
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Judgement


class SudokuOracle(RuleJudge):
    """Scores a move against the solution. reward: what the column "reward" is, "binary" (the paper)
    or "graded" (v2).

    binary: 1 for the solution's digit in a blank cell, else 0. graded: see ``graded``. valid_share:
    the chance that a uniformly random legal move is right, which is 1 / size in every state. Raises
    DataFault for a turn whose state is not a Sudoku state.
    """

    name = "sudoku"
    environments = ("sudoku",)
    columns = ("reward", "graded", "valid_share")

    def __init__(self, reward: Literal["binary", "graded"] = "binary"):
        self.reward = reward

    def judge(self, turn: JudgedTurn) -> Judgement:
        try:
            state = msgspec.convert(turn.state, State)
        except msgspec.ValidationError as error:
            raise DataFault(
                f"judge {self.name}, task {turn.question}: not a Sudoku state: {error}"
            ) from None
        cell = _blank_cell(state, turn.move)
        right = (
            cell is not None and turn.move is not None and state.solution[cell] == str(turn.move[2])
        )
        value, why = graded(state, cell, right, last=state.turn + 1 >= turn.budget)
        reward = float(right) if self.reward == "binary" else value
        return Judgement(
            {"reward": reward, "graded": value, "valid_share": 1 / state.size}, explanation=why
        )


def graded(state: State, cell: int | None, right: bool, last: bool) -> tuple[float, str]:
    """Return the graded value of a move and the reason. cell: the blank cell that the move names,
    None if it names none.

    2, 1 or 0.5 for the right digit in a cell with one candidate, with the fewest candidates, or
    with more; -1 for a wrong digit; -2 without a usable cell and for running out of turns
    (methods.md 3.3). As in the v2 code, running out of turns replaces the value of the last move,
    right or wrong. (Unlike here, the v2 code keeps -1 on the last turn for a wrong digit that ends
    the episode.)
    """
    if cell is None:
        return -2.0, "no digit for a blank cell"
    if last and not (right and state.board.count(BLANK) == 1):
        return -2.0, f"out of turns; the digit was {'right' if right else 'wrong'}"
    if not right:
        return -1.0, "wrong digit"
    counts = candidates(state.board)
    own, fewest = counts[cell], min(counts.values())
    if own == 1:
        return 2.0, "right digit, the only candidate"
    return (
        1.0 if own == fewest else 0.5
    ), f"right digit, {own} candidates, the fewest are {fewest}"


def _blank_cell(state: State, move: list[int] | None) -> int | None:
    """Return the cell of a move that may be played, else None."""
    if move is None or len(move) != 3:
        return None
    cell = cell_of(state.size, *move)
    return cell if cell is not None and state.board[cell] == BLANK else None
