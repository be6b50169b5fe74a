"""Sudoku, 9x9 or 4x4: one digit per turn. A wrong digit is not written and costs the turn
(methods.md 3.3).

Puzzles are GEM's: cells of a random full grid are emptied in random order, and a try counts if the
solution stays unique. One check of the emptied grid is enough, because a second solution of a
fuller grid would be one of this grid, too.
"""

import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from math import isqrt
from pathlib import Path

import msgspec

from coppice.actors.environments.base import Task, Tools, Transition
from coppice.actors.environments.game import STRIDE, TRIES, Game, labelled
from coppice.common.numbers import Count, Natural
from coppice.wire.faults import DataFault

BLANK = "."
MOST_BLANKS = {4: 12, 9: 64}
"""The most blanks by size: a puzzle with fewer than 4 (4x4) or 17 (9x9) clues has more than one
solution."""

_MOVE = re.compile(r"\s*([0-9]{1,3})[\s,]+([0-9]{1,3})[\s,]+([0-9]{1,3})\s*")


class SudokuState(msgspec.Struct, frozen=True):
    """A puzzle under way. Boards are ``size * size`` characters row by row, "." for a blank.

    turn: turns used. past: the last moves, each with "right" or "wrong". over: no move can be
    played any more.
    """

    size: int
    puzzle: str
    solution: str
    board: str
    turn: int = 0
    past: tuple[str, ...] = ()
    over: bool = False


class Sudoku(Game):
    """The Sudoku rules. prompt, history, stop_at_action: see ``Game``.

    size: 9 or 4. blanks: cells to fill. max_turns: turns until the episode ends with outcome 0.
    terminate_on_wrong: if True, a wrong digit ends the episode as a loss; otherwise the digit is
    refused and the episode goes on.
    """

    name = "sudoku"
    headline = "success"
    folder = Path(__file__).parent

    def __init__(
        self, prompt: str = "sudoku", history: Natural = 0, stop_at_action: bool = True,
        size: int = 9, blanks: int = 40, terminate_on_wrong: bool = False, max_turns: Count = 100,
    ):  # fmt: skip
        super().__init__(prompt, history, stop_at_action)
        if size not in MOST_BLANKS:
            raise ValueError(f"size = {size}: expected 9 or 4")
        most = MOST_BLANKS[size]
        if not 1 <= blanks <= most:
            raise ValueError(f"blanks = {blanks}: expected 1 to {most} for size {size}")
        self.size, self.blanks = size, blanks
        self.terminate_on_wrong, self.max_turns = terminate_on_wrong, max_turns

    def initial(self, task: Task) -> SudokuState:
        puzzle, solution = generate(self.size, self.blanks, task.seed)
        return SudokuState(self.size, puzzle, solution, puzzle)

    def view(self, state: SudokuState) -> dict[str, str]:
        """{board}: a labelled grid. {row}: its characters alone. {blanks}: the number of empty
        cells. {size}, {box}."""
        box = isqrt(state.size)
        return {
            "board": labelled(state.board, state.size, box),
            "row": state.board,
            "blanks": str(state.board.count(BLANK)),
            "size": str(state.size),
            "box": str(box),
        }

    def move(self, text: str) -> tuple[int, int, int] | None:
        """Read "ROW COL DIGIT", counted from 1 and separated by spaces or commas, as (row, column,
        digit) with row and column from 0."""
        match = _MOVE.fullmatch(text)
        return None if match is None else (int(match[1]) - 1, int(match[2]) - 1, int(match[3]))

    def moves(self, state: SudokuState) -> list[tuple[int, ...]]:
        return legal_moves(state)

    def good_moves(self, state: SudokuState) -> list[tuple[int, ...]]:
        """Return the solution's digit in every blank cell."""
        moves, right = legal_moves(state), state.solution
        return [(r, c, d) for r, c, d in moves if right[r * state.size + c] == str(d)]

    def notation(self, move: tuple[int, ...]) -> str:
        row, column, digit = move
        return f"{row + 1} {column + 1} {digit}"

    async def apply(self, state: SudokuState, move: tuple[int, ...], tools: Tools) -> Transition:
        """Write a right digit or refuse a wrong one. The outcome is 1 when solved, -1 when lost, 0
        when out of turns (methods.md 3.6)."""
        cell, digit, board = move[0] * state.size + move[1], str(move[2]), state.board
        right = state.solution[cell] == digit
        if right:
            board = board[:cell] + digit + board[cell + 1 :]
        lost = not right and self.terminate_on_wrong
        outcome = 1.0 if BLANK not in board else self.loss if lost else None
        line = f"{self.notation(move)} {'right' if right else 'wrong'}"
        return self.turned(msgspec.structs.replace(state, board=board), line, outcome)

    def lost(self, state: SudokuState) -> dict[str, float]:
        """Return success (1 when all blanks are filled) and completion (the share of the puzzle's
        blanks that are filled)."""
        blanks, left = state.puzzle.count(BLANK), state.board.count(BLANK)
        return {"success": float(left == 0), "completion": (blanks - left) / blanks}


# -------------------------------------------------------------------------------------- boards


def legal_moves(state: SudokuState) -> list[tuple[int, ...]]:
    """Return every digit in every blank cell, row by row."""
    blanks = [cell for cell, content in enumerate(state.board) if content == BLANK]
    digits = [] if state.over else range(1, state.size + 1)
    return [(*divmod(cell, state.size), digit) for cell in blanks for digit in digits]


@cache
def _places(size: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return every cell with the numbers of its row, its column and its box among all units."""
    box = isqrt(size)
    grid = (divmod(cell, size) for cell in range(size * size))
    return tuple((r * size + c, r, size + c, 2 * size + r // box * box + c // box) for r, c in grid)


def _free(board: str) -> list[int]:
    """Return for each row, then column, then box a bit mask of the digits that it does not hold
    (bit d - 1 for digit d)."""
    size = isqrt(len(board))
    free = [(1 << size) - 1] * (3 * size)
    for cell, *units in _places(size):
        if board[cell] != BLANK:
            for unit in units:
                free[unit] &= ~(1 << (int(board[cell]) - 1))
    return free


def candidates(board: str) -> dict[int, int]:
    """Return for each blank cell how many digits its row, column and box leave."""
    free = _free(board)
    blanks = (place for place in _places(isqrt(len(board))) if board[place[0]] == BLANK)
    return {cell: (free[r] & free[c] & free[b]).bit_count() for cell, r, c, b in blanks}


def solutions(board: str, rng: random.Random | None = None) -> Iterator[str]:
    """Yield the solutions, none if digits clash. Searches depth first, always in the cell with the
    fewest candidates; with ``rng``, in the order of the cells with digits in random order."""
    size, cells, free = isqrt(len(board)), list(board), _free(board)
    if sum(size - left.bit_count() for left in free) != 3 * (size**2 - board.count(BLANK)):
        return

    def search(blank: list[tuple[int, int, int, int]]) -> Iterator[str]:
        if not blank:
            yield "".join(cells)
            return
        best, fewest = 0, 0 if rng else size + 1
        for place, (_, row, column, box) in enumerate(blank):
            if fewest < 2:
                break
            count = (free[row] & free[column] & free[box]).bit_count()
            if count < fewest:
                best, fewest = place, count
        cell, *units = blank[best]
        rest, digits = blank[:best] + blank[best + 1 :], list(range(1, size + 1))
        if rng:
            rng.shuffle(digits)
        left = free[units[0]] & free[units[1]] & free[units[2]]
        for digit in digits:
            bit = 1 << (digit - 1)
            if left & bit:
                cells[cell] = str(digit)
                for unit in units:
                    free[unit] ^= bit
                yield from search(rest)
                for unit in units:
                    free[unit] ^= bit

    yield from search([place for place in _places(size) if board[place[0]] == BLANK])


def generate(size: int, blanks: int, seed: int) -> tuple[str, str]:
    """Return a puzzle with exactly ``blanks`` blanks and one solution, and the solution. Raises
    DataFault after ``TRIES`` tries."""
    for attempt in range(TRIES):
        rng = random.Random(seed + attempt * STRIDE)
        solution = next(solutions(BLANK * size**2, rng))
        order = list(range(size * size))
        rng.shuffle(order)
        emptied = set(order[:blanks])
        puzzle = "".join(BLANK if cell in emptied else digit for cell, digit in enumerate(solution))
        if len(list(islice(solutions(puzzle), 2))) == 1:
            return puzzle, solution
    raise DataFault(
        f"sudoku: no puzzle of size {size} with {blanks} blanks and one solution from seed {seed}"
        f" in {TRIES} tries; ask for fewer blanks"
    )
