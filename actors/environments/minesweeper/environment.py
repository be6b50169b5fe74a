"""Minesweeper: reveal every cell without a mine, with one reveal or one flag per turn (methods.md
3.4). The first reveal, by default a free one of the centre, places the mines outside its 3x3.

A board that the free reveal solves is drawn again. This does not change the odds of the mines that
a player faces, because a solved board would have shown other numbers.
"""

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from coppice.actors.environments.base import Task, Tools, Transition
from coppice.actors.environments.game import STRIDE, TRIES, Game, labelled
from coppice.common.numbers import Count, Natural
from coppice.wire.faults import DataFault

HIDDEN, FLAG, ZERO, HIT = "#", "F", ".", "*"
"""The marks on a board beside the digits 1..8: unknown, flagged by the player, no mine around, and
the mine that ended the game."""
MINE, SAFE = "*", "."
"""The marks of a layout."""
REVEAL, MARK = 0, 1
"""The first integer of a move: whether it reveals or flags a cell."""

_MOVE = re.compile(
    r"\s*(reveal|open|click|flag|mark)[\s,]+([0-9]{1,4})[\s,]+([0-9]{1,4})\s*",
    re.ASCII | re.IGNORECASE,
)


class MinesState(msgspec.Struct, frozen=True):
    """A game under way. Boards are ``rows * columns`` characters row by row.

    board: what the player sees: "#" hidden, "F" flagged, "." for 0, "1".."8". layout: "*" where a
    mine is; empty before the first reveal. flag_all: every mine must also be flagged. turn: turns
    used. past: the last moves with their results. over: no move can be played any more.
    """

    rows: int
    columns: int
    mines: int
    seed: int
    board: str
    layout: str = ""
    flag_all: bool = False
    turn: int = 0
    past: tuple[str, ...] = ()
    over: bool = False


class Minesweeper(Game):
    """The Minesweeper rules. prompt, history, stop_at_action: see ``Game``.

    centre_start: the centre is revealed before turn 1. success_rule: with "reveal" all safe cells
    must be revealed; with "flags", GEM's rule, also exactly the mines must be flagged. Both are
    measured. max_turns: turns until the episode ends with outcome 0.
    """

    name = "minesweeper"
    headline = "success"
    measured = ("success", "completion", "success_reveal", "success_flags")
    folder = Path(__file__).parent

    def __init__(
        self, prompt: str = "minesweeper", history: Natural = 0, stop_at_action: bool = True,
        rows: Count = 5, columns: Count = 5, mines: int = 5, centre_start: bool = True,
        success_rule: Literal["reveal", "flags"] = "reveal", max_turns: Count = 25,
    ):  # fmt: skip
        super().__init__(prompt, history, stop_at_action)
        most = rows * columns - min(rows, 3) * min(columns, 3) - centre_start
        if most < 1:
            size = f"rows = {rows}, columns = {columns}"
            raise ValueError(f"{size}: expected a board larger than 3x3")
        if not 1 <= mines <= most:
            raise ValueError(
                f"mines = {mines}: expected 1 to {most} on {rows}x{columns}, as the 3x3 around the"
                f" first reveal{', and one safe cell,' * centre_start} must be free of mines"
            )
        self.rows, self.columns, self.mines, self.max_turns = rows, columns, mines, max_turns
        self.centre_start, self.flag_all = centre_start, success_rule == "flags"

    def initial(self, task: Task) -> MinesState:
        board = HIDDEN * (self.rows * self.columns)
        size = self.rows, self.columns, self.mines
        state = MinesState(*size, task.seed, board, flag_all=self.flag_all)
        if not self.centre_start:
            return state
        centre = self.rows // 2 * self.columns + self.columns // 2
        for attempt in range(TRIES):
            drawn = msgspec.structs.replace(state, seed=task.seed + attempt * STRIDE)
            if not all_revealed(opened := revealed(drawn, centre)):
                return opened
        raise DataFault(
            f"minesweeper: revealing the centre of {self.rows}x{self.columns} with {self.mines}"
            f" mines from seed {task.seed} solves it in each of {TRIES} tries; ask for more mines"
        )

    def view(self, state: MinesState) -> dict[str, str]:
        """{board}: a labelled grid. {row}: its characters alone. {flags_left}: mines minus flags.
        Also {mines}, {goal}, {rows}, {columns}."""
        return {
            "board": labelled(state.board, state.columns),
            "row": state.board,
            "mines": str(state.mines),
            "flags_left": str(state.mines - state.board.count(FLAG)),
            "goal": "reveal every cell without a mine"
            + (", and flag every mine and nothing else" * state.flag_all),
            "rows": str(state.rows),
            "columns": str(state.columns),
        }

    def move(self, text: str) -> tuple[int, int, int] | None:
        """Read "reveal R C" (or open, click) or "flag R C" (or mark) as (kind, row, column)."""
        if (match := _MOVE.fullmatch(text)) is None:
            return None
        kind = MARK if match[1].lower() in ("flag", "mark") else REVEAL
        return kind, int(match[2]) - 1, int(match[3]) - 1

    def moves(self, state: MinesState) -> list[tuple[int, ...]]:
        return legal_moves(state)

    def notation(self, move: tuple[int, ...]) -> str:
        kind, row, column = move
        return f"{'flag' if kind == MARK else 'reveal'} {row + 1} {column + 1}"

    async def apply(self, state: MinesState, move: tuple[int, ...], tools: Tools) -> Transition:
        """Toggle a flag or reveal a cell. The outcome is 1 when solved, -1 after a mine, 0 when out
        of turns (methods.md 3.4, 3.6)."""
        after = played(state, move)
        mark = after.board[move[1] * state.columns + move[2]]
        result = {HIT: "mine", FLAG: "flagged", HIDDEN: "unflagged"}.get(mark, "safe")
        outcome = self.loss if mark == HIT else 1.0 if solved(after) else None
        return self.turned(after, f"{self.notation(move)} {result}", outcome)

    def lost(self, state: MinesState) -> dict[str, float]:
        """Return success by the chosen rule, success_reveal and success_flags by each rule, and
        completion, the share of revealed safe cells."""
        cells = len(state.board)
        return {
            "success": float(solved(state)),
            "success_reveal": float(all_revealed(state)),
            "success_flags": float(all_revealed(state) and all_flagged(state)),
            "completion": (cells - _closed(state.board)) / (cells - state.mines),
        }


# ----------------------------------------------------------------------------------- the rules


@cache
def neighbours(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return for each cell the up to eight cells around it, in ascending order."""
    return tuple(
        tuple(
            r * columns + c
            for r in range(max(row - 1, 0), min(row + 2, rows))
            for c in range(max(column - 1, 0), min(column + 2, columns))
            if (r, c) != (row, column)
        )
        for row in range(rows)
        for column in range(columns)
    )


def lay(rows: int, columns: int, mines: int, cell: int, seed: int) -> str:
    """Return a layout whose mines are drawn uniformly outside the 3x3 around ``cell``."""
    kept = {cell, *neighbours(rows, columns)[cell]}
    open_cells = [other for other in range(rows * columns) if other not in kept]
    laid = set(random.Random(seed).sample(open_cells, mines))
    return "".join(MINE if other in laid else SAFE for other in range(rows * columns))


def legal_moves(state: MinesState) -> list[tuple[int, ...]]:
    """Return every reveal, row by row, then every flag: a hidden cell may be revealed or flagged,
    and a flagged cell only unflagged."""
    if state.over:
        return []
    cells = [(mark, divmod(cell, state.columns)) for cell, mark in enumerate(state.board)]
    reveals = [(REVEAL, *place) for mark, place in cells if mark == HIDDEN]
    return reveals + [(MARK, *place) for mark, place in cells if mark in (HIDDEN, FLAG)]


def played(state: MinesState, move: Sequence[int]) -> MinesState:
    """Return the state after a legal move."""
    kind, row, column = move
    cell = row * state.columns + column
    if kind == REVEAL:
        return revealed(state, cell)
    mark = FLAG if state.board[cell] == HIDDEN else HIDDEN
    return msgspec.structs.replace(state, board=state.board[:cell] + mark + state.board[cell + 1 :])


def revealed(state: MinesState, cell: int) -> MinesState:
    """Reveal the hidden ``cell``. A revealed cell without mines around it also reveals all its
    neighbours without a flag, and so on."""
    layout = state.layout or lay(state.rows, state.columns, state.mines, cell, state.seed)
    near, board, reached = neighbours(state.rows, state.columns), list(state.board), [cell]
    while reached:
        at = reached.pop()
        if board[at] != HIDDEN:
            continue
        around = sum(layout[other] == MINE for other in near[at])
        board[at] = HIT if layout[at] == MINE else str(around) if around else ZERO
        if board[at] == ZERO:
            reached += near[at]
    return msgspec.structs.replace(state, board="".join(board), layout=layout)


def all_revealed(state: MinesState) -> bool:
    """Return whether every cell without a mine is revealed."""
    return state.layout != "" and _closed(state.board) == state.mines


def _closed(board: str) -> int:
    """Return the number of cells that are not revealed as safe."""
    return sum(map(board.count, (HIDDEN, FLAG, HIT)))


def all_flagged(state: MinesState) -> bool:
    """Return whether exactly the mines have flags."""
    return "".join(MINE if mark == FLAG else SAFE for mark in state.board) == state.layout


def solved(state: MinesState) -> bool:
    """Return whether the game is won by its own rule."""
    return all_revealed(state) and (not state.flag_all or all_flagged(state))
