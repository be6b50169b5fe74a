"""The Sudoku environment; puzzles are checked by a plain solver that shares nothing with the
environment's."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.base import Task, Transition
from coppice.actors.environments.sudoku import environment as sudoku
from coppice.actors.environments.sudoku.environment import Sudoku, SudokuState, generate, solutions
from coppice.wire.faults import DataFault
from tests import games

SOLVED = "1234341221434321"
SEEDS = st.integers(0, 2**31)
PUZZLES = st.sampled_from([(4, 1), (4, 6), (4, 10), (4, 12), (9, 1), (9, 20), (9, 40)])


def test_good_moves_are_the_solutions_digits() -> None:
    state = SudokuState(4, "", SOLVED, SOLVED[:5] + ".." + SOLVED[7:])
    assert Sudoku(size=4, blanks=2).good_moves(state) == [(1, 1, 4), (1, 2, 1)]


def plain_search(board: str, limit: int) -> set[str]:
    """At most ``limit`` solutions, by trying in each blank what its row, column and box leave."""
    size = round(len(board) ** 0.5)
    box = round(size**0.5)
    found: set[str] = set()

    def units(cell: int) -> tuple[int, int, int]:
        row, column = divmod(cell, size)
        return row, size + column, 2 * size + row // box * box + column // box

    def left(cells: str, cell: int) -> list[str]:
        near = [other for other in range(len(cells)) if {*units(other)} & {*units(cell)}]
        held = {cells[other] for other in near if other != cell}
        return [digit for digit in "123456789"[:size] if digit not in held]

    def search(cells: str) -> None:
        options = {cell: left(cells, cell) for cell, mark in enumerate(cells) if mark == "."}
        if not options:
            found.add(cells)
            return
        cell = min(options, key=lambda blank: len(options[blank]))
        for digit in options[cell]:
            if len(found) < limit:
                search(cells[:cell] + digit + cells[cell + 1 :])

    if all(mark == "." or mark in left(board, cell) for cell, mark in enumerate(board)):
        search(board)
    return found


@given(PUZZLES, SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_puzzle_has_exactly_its_blanks_and_one_solution(kind: tuple[int, int], seed: int) -> None:
    size, blanks = kind
    state = Sudoku(size=size, blanks=blanks).initial(Task("t", seed=seed))
    assert state == SudokuState(size, state.puzzle, state.solution, state.puzzle)
    assert len(state.puzzle) == size * size
    assert state.puzzle.count(".") == blanks
    assert plain_search(state.puzzle, 2) == {state.solution}


def test_the_puzzle_of_a_seed_never_changes() -> None:
    assert generate(4, 8, 7) == ("1.4....123.4.13.", "1243342123144132")
    # the first try finds none
    assert generate(4, 12, 100) == (".....31.....1..4", "2143431234211234")


def test_a_seed_without_a_puzzle_is_a_data_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku, "TRIES", 1)
    with pytest.raises(DataFault, match="size 4 with 12 blanks and one solution from seed 100"):
        generate(4, 12, 100)


def test_the_solver_knows_all_grids_of_size_4() -> None:
    assert len(set(solutions("." * 16))) == 288
    assert list(solutions(SOLVED)) == [SOLVED]


def test_the_solver_finds_the_one_solution_of_17_clues() -> None:
    clues = "000000010400000000020000000000050407008000300001090000300400200050100000000806000"
    answer = "693784512487512936125963874932651487568247391741398625319475268856129743274836159"
    assert list(solutions(clues.replace("0", "."))) == [answer]


@given(SEEDS, st.booleans(), st.integers(1, 60), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_random_legal_play_keeps_the_rules(
    seed: int, terminate: bool, cap: int, rng: random.Random
) -> None:
    game = Sudoku(size=4, blanks=10, terminate_on_wrong=terminate, max_turns=cap)
    state = game.initial(game.task(seed))
    transition = Transition(state, "", False)
    while not transition.done:
        blank = [divmod(cell, 4) for cell, mark in enumerate(state.board) if mark == "."]
        assert game.moves(state) == [(*place, digit) for place in blank for digit in (1, 2, 3, 4)]
        row, column, digit = move = rng.choice(game.moves(state))
        before, (transition,) = state, games.play(game, state, game.notation(move))
        state = transition.state
        right = before.solution[row * 4 + column] == str(digit)
        changed = [cell for cell in range(16) if before.board[cell] != state.board[cell]]
        assert changed == ([row * 4 + column] if right else [])
        assert state.board[row * 4 + column] in (".", state.solution[row * 4 + column])
        kept = msgspec.structs.replace(state, board=before.board, turn=before.turn)
        assert msgspec.structs.replace(kept, over=False) == before
        assert state.turn == before.turn + 1
        solved, wrong, late = "." not in state.board, terminate and not right, state.turn == cap
        assert transition.done == (solved or wrong or late)
        assert transition.outcome == (1 if solved else -1 if wrong else 0 if late else None)
    assert transition.measures == {
        "success": float("." not in state.board),
        "completion": pytest.approx(1 - state.board.count(".") / 10),
    }
    assert game.moves(state) == []


def test_a_move_is_row_column_digit_counted_from_1() -> None:
    read: dict[str, Any] = dict.fromkeys(("3 7 5", "3,7, 5", "\n3  7\t5\n"), (2, 6, 5))
    read |= dict.fromkeys(("375", "3 7", "3 7 5 1", "-3 7 5", "٣ 7 5", "9" * 5000))
    assert {text: Sudoku().move(text) for text in read} == read
