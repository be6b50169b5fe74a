"""The Sudoku oracle."""

import asyncio
import random
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.sudoku.environment import Sudoku, SudokuState
from coppice.judges.oracles.sudoku import SudokuOracle
from coppice.wire.messages import JudgedTurn
from tests import games

NOBODY: Any = None
SOLVED = "1234341221434321"
SOME_FORCED = "123." + "3412" + "...3" + "...."
"""Candidates: 4 in (1, 4); 1 in (3, 2); two or three in every other cell."""


def judged(board: str, move: list[int] | None, turn: int = 0, budget: int = 100) -> JudgedTurn:
    state = msgspec.to_builtins(SudokuState(4, board, SOLVED, board, turn))
    return JudgedTurn("sudoku-1", [], "", "", turn + 1, budget, state=state, move=move)


def scores(
    turns: list[JudgedTurn], reward: Literal["binary", "graded"] = "binary"
) -> list[dict[str, float]]:
    return games.scores(SudokuOracle(reward), turns)


@pytest.mark.parametrize(
    ("board", "move", "binary", "graded"),
    [
        (SOME_FORCED, [0, 3, 4], 1, 2),
        (SOME_FORCED, [2, 0, 2], 1, 0.5),
        (SOME_FORCED, [2, 0, 4], 0, -1),  # a candidate, but not the solution
        (SOME_FORCED, [0, 0, 1], 0, -2),  # filled
        (SOME_FORCED, [-1, 3, 4], 0, -2),
        (SOME_FORCED, [0, 3, 0], 0, -2),
        (SOME_FORCED, None, 0, -2),
    ],
)
def test_moves_on_hand_made_boards(
    board: str, move: list[int] | None, binary: float, graded: float
) -> None:
    turn = judged(board, move)
    assert scores([turn]) == [{"reward": binary, "graded": graded, "valid_share": 0.25}]
    assert scores([turn], "graded") == [{"reward": graded, "graded": graded, "valid_share": 0.25}]


@pytest.mark.parametrize(
    ("board", "digit", "binary", "graded"),
    [("..34", 1, 1, -2), ("..34", 2, 0, -2), (".234", 1, 1, 2), (".234", 2, 0, -2)],
)
def test_running_out_of_turns_is_graded_as_such(
    board: str, digit: int, binary: float, graded: float
) -> None:
    board = board + SOLVED[4:]
    (last,) = scores([judged(board, [0, 0, digit], turn=6, budget=7)])
    (before,) = scores([judged(board, [0, 0, digit], turn=5, budget=7)])
    assert (last["reward"], last["graded"]) == (binary, graded)
    assert before["graded"] == (2 if binary else -1)


KINDS = st.sampled_from([(4, 10), (9, 40)])
RANDOM = st.randoms(use_true_random=False)


@given(st.integers(0, 2**31), KINDS, st.integers(0, 30), RANDOM)
@settings(max_examples=12, deadline=None)
def test_all_legal_moves_of_a_reached_state(
    seed: int, kind: tuple[int, int], plies: int, rng: random.Random
) -> None:
    """Binary is what the environment accepts; graded follows the candidates of the board."""
    size, blanks = kind
    game = Sudoku(size=size, blanks=blanks)
    state = game.initial(game.task(seed))
    for _ in range(min(plies, blanks - 1)):
        cell = rng.choice([cell for cell, content in enumerate(state.board) if content == "."])
        answer = (*divmod(cell, size), int(state.solution[cell]))
        state = asyncio.run(game.apply(state, answer, NOBODY)).state
    box, open_digits = {4: 2, 9: 3}[size], dict[tuple[int, int], set[str]]()
    for row, column, _ in game.moves(state):
        seen = {
            content
            for (r, c), content in ((divmod(k, size), state.board[k]) for k in range(size * size))
            if r == row or c == column or (r // box, c // box) == (row // box, column // box)
        }
        open_digits[row, column] = {str(d) for d in range(1, size + 1)} - seen
    fewest = min(map(len, open_digits.values()))
    moves = game.moves(state)
    actions = [game.read(state, f"<action>{game.notation(move)}</action>") for move in moves]
    turns = [game.judged(game.task(seed), state, action, 1, 4) for action in actions]
    made = scores(games.travelled(turns))
    for move, column in zip(moves, made, strict=True):
        after = asyncio.run(game.apply(state, move, NOBODY)).state
        assert column["reward"] == (after.board != state.board)
        own = len(open_digits[move[0], move[1]])
        right = 2 if own == 1 else 1 if own == fewest else 0.5
        assert column["graded"] == (right if column["reward"] else -1)
        share = sum(other["reward"] for other in made) / len(made)
        assert column["valid_share"] == pytest.approx(share)


@pytest.mark.parametrize("state", [None, {"board": "........."}])
def test_a_turn_of_another_environment_is_a_data_fault(state: Any) -> None:
    assert games.refused(SudokuOracle(), state)
