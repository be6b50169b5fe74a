"""The Minesweeper oracle: it judges whether a move has the least risk, or is the flag of a certain
mine (methods.md 3.4)."""

from typing import Any, Literal

import msgspec

from coppice.actors.environments.minesweeper import environment as game
from coppice.common.numbers import Count
from coppice.judges.base import Oracle
from coppice.judges.oracles.posterior import BUDGET, posterior
from coppice.wire.messages import JudgedTurn, Judgement

TOLERANCE = 1e-9
"""Risks that differ by less than this are equal."""
_MARKS = {game.HIDDEN, game.FLAG, game.ZERO, *"12345678"}


class Labels(msgspec.Struct, frozen=True):
    """The moves of a position. risks: the risk of every hidden cell, flagged or not. safest: the
    valid reveals. mines: the valid flags."""

    risks: dict[int, float]
    safest: frozenset[int]
    mines: frozenset[int]
    exact: bool


def labels(state: game.MinesState, budget: int = BUDGET) -> Labels:
    """Return the valid moves: the reveals of least risk, including all ties, and the flags of
    certain mines.

    Cells with a flag are in neither set (v2) and give no information, and revealing a certain mine
    is never valid. Before the first reveal, every reveal is safe. Raises ValueError when no
    layout fits the board.
    """
    open_cells = [cell for cell, mark in enumerate(state.board) if mark == game.HIDDEN]
    if not state.layout:
        risks = dict.fromkeys(range(len(state.board)), 0.0)
        return Labels(risks, frozenset(open_cells), frozenset(), True)
    marks = enumerate(state.board.replace(game.ZERO, "0"))
    numbers = {cell: int(mark) for cell, mark in marks if mark not in (game.HIDDEN, game.FLAG)}
    chances = posterior(state.rows, state.columns, state.mines, numbers, budget)
    risks = chances.risks()
    mines = frozenset(cell for cell in open_cells if chances.certain(cell))
    others = [cell for cell in open_cells if cell not in mines]
    least = min((risks[cell] for cell in others), default=0.0)
    safest = frozenset(cell for cell in others if risks[cell] <= least + TOLERANCE)
    return Labels(risks, safest, mines, chances.exact)


class MinesweeperOracle(Oracle):
    """reward: what the column "reward" is, "binary" (the paper: 1 for a valid move, see ``labels``,
    else 0) or "graded" (v2, see ``graded``).

    risk: the risk of the revealed cell, absent for other moves. exact: 0 if the budget was not
    enough (see ``posterior``). valid_share: the chance that a uniformly random legal move is valid.
    budget: nodes per position.
    """

    name = "minesweeper"
    environments = ("minesweeper",)
    columns = ("reward", "graded", "risk", "exact", "valid_share")
    limits = (-2.0, 2.0)
    concurrency = 64
    batch = 32
    threaded = True

    def __init__(self, reward: Literal["binary", "graded"] = "binary", budget: Count = BUDGET):
        self.reward, self.budget = reward, budget

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        state, move = _read(turn.state), tuple(turn.move or ())
        moves, legal = labels(state, self.budget), game.legal_moves(state)
        cell = move[1] * state.columns + move[2] if move in legal else None
        valid = cell in (moves.mines if move[:1] == (game.MARK,) else moves.safest)
        value, why = graded(state, moves, move, cell, last=state.turn + 1 >= turn.budget)
        scores = {
            "reward": float(valid) if self.reward == "binary" else value,
            "graded": value,
            "exact": float(moves.exact),
            "valid_share": (len(moves.safest) + len(moves.mines)) / len(legal),
        }
        if cell is not None and move[0] == game.REVEAL:
            scores["risk"] = moves.risks[cell]
        return Judgement(scores, explanation=why)


def graded(
    state: game.MinesState, moves: Labels, move: tuple[int, ...], cell: int | None, last: bool
) -> tuple[float, str]:
    """Return the v2 value of a move and the reason. cell: None unless the move is legal.

    2 for a safe reveal, 1 for the flag of a certain mine, 1 for a reveal of least risk when none is
    safe, 0 for any other reveal, -1 for any other flag, -2 for an unusable move, and -2 for running
    out of turns, whatever the last move was (methods.md 3.4).
    """
    if cell is None:
        return -2.0, "no legal move"
    if move[0] == game.MARK:
        value, why = -1.0, "flag that is not a certain mine's"
        if cell in moves.mines:
            value, why = 1.0, "flag of a certain mine"
    elif (risk := moves.risks[cell]) < TOLERANCE:
        value, why = 2.0, "safe reveal"
    else:
        least = min((moves.risks[c] for c in moves.safest), default=1.0)
        value = 1.0 if cell in moves.safest else 0.0
        why = f"reveal at risk {risk:.3f}, the least is {least:.3f}"
    if last:
        after = game.played(state, move)
        if after.board[cell] != game.HIT and not game.solved(after):
            return -2.0, f"out of turns; {why}"
    return value, why


def _read(plain: Any) -> game.MinesState:
    """Return the state of plain values. Raises ValueError unless it is a game in progress."""
    state = msgspec.convert(plain, game.MinesState)
    cells, shown = state.rows * state.columns, set(state.board)
    sized = len(state.board) == cells > 0 and len(state.layout) in (0, cells)
    begun = state.layout or shown <= {game.HIDDEN, game.FLAG}
    if not (sized and begun and shown <= _MARKS and shown & {game.HIDDEN, game.FLAG}) or state.over:
        raise ValueError(
            f"board {state.board!r}, mines {state.layout!r}: expected a game that is on, of"
            f" {state.rows} rows and {state.columns} columns"
        )
    return state
