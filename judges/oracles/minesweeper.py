"""Minesweeper: is the move one of least risk, or the flag of a certain mine (methods.md 3.4)?"""

import asyncio
from typing import Any, Literal

import msgspec

from actors.environments.minesweeper import FLAG, HIDDEN, HIT, MARK, REVEAL, ZERO, State, cell_of, played, solved
from judges.base import Judge
from judges.oracles.posterior import BUDGET, Posterior, posterior
from wire.faults import DataFault
from wire.messages import JudgedTurn, Judgement

REWARDS = ("binary", "graded")
TOLERANCE = 1e-9
"""Risks this close are equal."""
_MARKS = {HIDDEN, FLAG, ZERO, *"12345678"}


class Labels(msgspec.Struct, frozen=True):
    """The moves of a position. risks: of every hidden cell, flagged or not. safest: the valid reveals. mines: the valid flags."""

    risks: dict[int, float]
    safest: frozenset[int]
    mines: frozenset[int]
    exact: bool


def labels(state: State, budget: int = BUDGET) -> Labels:
    """Which moves are valid: the reveals of least risk, all ties, and the flags of certain mines.

    Cells with a flag are left out of both (v2), and revealing a certain mine is never valid. Before the first reveal every reveal is
    safe. Raises Contradiction when the board fits no layout.
    """
    open_cells = [cell for cell, mark in enumerate(state.board) if mark == HIDDEN]
    if not state.layout:
        risks = {cell: 0.0 for cell, mark in enumerate(state.board) if mark in (HIDDEN, FLAG)}
        return Labels(risks, frozenset(open_cells), frozenset(), True)
    found = seen(state, budget)
    risks = found.risks()
    mines = frozenset(cell for cell in open_cells if found.certain(cell))
    others = [cell for cell in open_cells if cell not in mines]
    least = min((risks[cell] for cell in others), default=0.0)
    safest = frozenset(cell for cell in others if risks[cell] <= least + TOLERANCE)
    return Labels(risks, safest, mines, found.exact)


def seen(state: State, budget: int = BUDGET) -> Posterior:
    """The posterior of what the player sees; flags are the player's own marks and tell nothing."""
    numbers = {
        cell: int(mark) if mark != ZERO else 0 for cell, mark in enumerate(state.board) if mark not in (HIDDEN, FLAG)
    }
    return posterior(state.rows, state.columns, state.mines, numbers, budget)


class MinesweeperOracle(Judge):
    """Scores a move against the exact posterior. reward: what the column "reward" is, "binary" (the paper) or "graded" (v2).

    binary: 1 for a valid move (see ``labels``), else 0. graded: see ``graded``. risk: of the cell revealed, absent for other moves.
    exact: 0 where the budget was spent (see ``posterior``). valid_share: the chance that a uniformly random legal move is valid.
    budget: nodes of a position. Raises DataFault for a turn that shows no Minesweeper game that is on.
    """

    name = "minesweeper"
    environments = ("minesweeper",)
    columns = ("reward", "graded", "risk", "exact", "valid_share")
    concurrency = 64
    batch = 32

    def __init__(self, reward: Literal["binary", "graded"] = "binary", budget: int = BUDGET):
        if reward not in REWARDS:
            raise ValueError(f"reward = {reward!r}: expected one of {', '.join(map(repr, REWARDS))}")
        if budget < 1:
            raise ValueError(f"budget = {budget}: expected 1 or more nodes a position")
        self.reward, self.budget = reward, budget

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return await asyncio.to_thread(lambda: [self._judge(turn) for turn in turns])

    def _judge(self, turn: JudgedTurn) -> Judgement:
        try:
            state = _read(turn.state)
            found = labels(state, self.budget)
        except ValueError as error:
            raise DataFault(f"judge {self.name}, task {turn.question}: not a Minesweeper state: {error}") from None
        cell = None if turn.move is None else cell_of(state, turn.move)
        kind = REVEAL if turn.move is None or cell is None else turn.move[0]
        valid = cell in (found.mines if kind == MARK else found.safest)
        value, why = graded(state, found, kind, cell, last=state.turn + 1 >= turn.budget)
        legal = 2 * state.board.count(HIDDEN) + state.board.count(FLAG)
        scores = {
            "reward": float(valid) if self.reward == "binary" else value,
            "graded": value,
            "exact": float(found.exact),
            "valid_share": (len(found.safest) + len(found.mines)) / legal,
        }
        if cell is not None and kind == REVEAL:
            scores["risk"] = found.risks[cell]
        return Judgement(scores, explanation=why)


def graded(state: State, found: Labels, kind: int, cell: int | None, last: bool) -> tuple[float, str]:
    """The v2 value of a move and the reason. cell: None unless the move is legal.

    2 for a safe reveal, 1 for a certain flag, 1 for a reveal of least risk when none is safe, 0 for any other reveal, -1 for any other
    flag, -2 without a usable move and for running out of turns, whatever the last move was (methods.md 3.4).
    """
    if cell is None:
        return -2.0, "no legal move"
    if kind == MARK:
        value, why = (
            (1.0, "flag of a certain mine") if cell in found.mines else (-1.0, "flag that is not a certain mine's")
        )
    else:
        value, why = _graded_reveal(found, cell)
    if last:
        after = played(state, (kind, *divmod(cell, state.columns)))
        if after.board[cell] != HIT and not solved(after):
            return -2.0, f"out of turns; {why}"
    return value, why


def _graded_reveal(found: Labels, cell: int) -> tuple[float, str]:
    risk, least = found.risks[cell], min((found.risks[c] for c in found.safest), default=1.0)
    if risk < TOLERANCE:
        return 2.0, "safe reveal"
    why = f"reveal at risk {risk:.3f}, the least is {least:.3f}"
    return (1.0 if cell in found.safest else 0.0), why


def _read(plain: Any) -> State:
    """The state in plain values. Raises ValueError unless it shows a board of a game that is on."""
    state = msgspec.convert(plain, State)
    cells = state.rows * state.columns
    shown = set(state.board)
    if min(state.rows, state.columns) < 1 or len(state.board) != cells or len(state.layout) not in (0, cells):
        raise ValueError(
            f"board {state.board!r}: expected {state.rows} rows of {state.columns} cells, and a layout as large or none"
        )
    if not shown <= _MARKS or not shown & {HIDDEN, FLAG} or state.over:
        raise ValueError(
            f"board {state.board!r}: expected marks of {''.join(sorted(_MARKS))!r}, some of them hidden, and a game that is on"
        )
    if not state.layout and not shown <= {HIDDEN, FLAG}:
        raise ValueError(f"board {state.board!r}: revealed cells, but the mines are not placed")
    return state
