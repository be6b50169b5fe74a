"""The Minesweeper environment; reveals are checked by a flood fill that works on the whole grid
instead of a list of cells."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.base import Transition
from coppice.actors.environments.minesweeper import environment as minesweeper
from coppice.actors.environments.minesweeper.environment import MARK, REVEAL, Minesweeper, revealed
from coppice.wire.faults import DataFault
from tests import games

SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([(5, 5, 5), (4, 4, 3), (3, 6, 4), (8, 8, 10), (6, 4, 9), (2, 9, 5)])


def flooded(rows: int, columns: int, layout: str, board: str, cell: int) -> str:
    """The board after the reveal of a safe cell: sweeps over the grid until no hidden cell touches
    a zero opened by it."""

    def around(at: int) -> list[int]:
        row, column = divmod(at, columns)
        block = itertools.product(range(row - 1, row + 2), range(column - 1, column + 2))
        return [r * columns + c for r, c in block if 0 <= r < rows and 0 <= c < columns]

    shown = [
        str(sum(layout[near] == "*" for near in around(at)) or ".") for at in range(len(board))
    ]
    after, opened, before = list(board), {cell}, set[int]()
    after[cell] = shown[cell]
    while opened != before:
        before = set(opened)
        for at in range(len(board)):
            if after[at] == "#" and any(
                near in before and after[near] == "." for near in around(at)
            ):
                after[at] = shown[at]
                opened.add(at)
    return "".join(after)


@given(SEEDS, st.sampled_from([(5, 5, 5, 12), (4, 4, 3, 10), (8, 8, 10, 36)]))
@settings(max_examples=60, deadline=None)
def test_the_free_reveal_is_of_the_centre_and_leaves_something_to_play(
    seed: int, kind: tuple[int, int, int, int]
) -> None:
    rows, columns, mines, centre = kind
    rules = Minesweeper(rows=rows, columns=columns, mines=mines)
    state = rules.initial(rules.task(seed))
    assert state.board == flooded(rows, columns, state.layout, "#" * rows * columns, centre)
    assert (state.turn, state.over, state.layout.count("*")) == (0, False, mines)
    assert state.board.count("#") > mines
    assert state == rules.initial(rules.task(seed))


def test_mines_are_uniform_outside_the_free_region() -> None:
    rules, counts = Minesweeper(centre_start=False), [0] * 25
    for seed in range(3200):
        state = revealed(rules.initial(rules.task(seed)), 12)
        counts = [count + (mark == "*") for count, mark in zip(counts, state.layout, strict=True)]
    ring = [count for count in counts if count]
    assert len(ring) == 16
    assert ring == pytest.approx([1000] * 16, abs=4 * (3200 * 5 / 16 * 11 / 16) ** 0.5)
    default = Minesweeper()  # whose boards never change
    assert default.initial(default.task(7)).layout == "*.*......*.........*....*"


def test_a_board_that_the_free_reveal_solves_is_drawn_again_and_after_all_tries_a_data_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = Minesweeper(mines=3)
    states = [rules.initial(rules.task(seed)) for seed in range(40)]
    redrawn = [seed for seed, state in enumerate(states) if state.seed != seed]
    assert 0 < len(redrawn) < 40
    assert all((states[seed].seed - seed) % 1_000_003 == 0 for seed in redrawn)
    monkeypatch.setattr(minesweeper, "TRIES", 1)
    said = f"5x5 with 3 mines from seed {redrawn[0]} solves it in each of 1 tries"
    with pytest.raises(DataFault, match=said):
        rules.initial(rules.task(redrawn[0]))


@given(SIZES, SEEDS, st.randoms(use_true_random=False), st.booleans(), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_random_legal_play_keeps_the_rules(
    size: tuple[int, int, int], seed: int, rng: random.Random, flag_all: bool, cap: int
) -> None:
    rows, columns, mines = size
    options: Any = {"rows": rows, "columns": columns, "mines": mines, "max_turns": cap}
    options["success_rule"] = "flags" if flag_all else "reveal"
    rules = Minesweeper(centre_start=False, **options)
    state = rules.initial(rules.task(seed))
    transition, hidden = Transition(state, "", False), rows * columns
    cleared = marked = won = False
    while not transition.done:
        assert rules.moves(state) == [
            (kind, *divmod(cell, columns))
            for kind, marks in ((REVEAL, "#"), (MARK, "#F"))
            for cell, mark in enumerate(state.board)
            if mark in marks
        ]
        kind, row, column = move = rng.choice(rules.moves(state))
        cell, before = row * columns + column, state
        (transition,) = games.play(rules, state, rules.notation(move))
        state = transition.state
        assert (state.seed, state.mines, state.turn) == (before.seed, before.mines, before.turn + 1)
        if kind == REVEAL and not before.layout:
            assert (state.layout.count("*"), len(state.layout)) == (mines, rows * columns)
            assert state.board[cell] == ".", "the mines lie outside the 3x3 around it"
        if kind == MARK or state.layout[cell] == "*":
            mark = {"#": "F", "F": "#"}[before.board[cell]] if kind == MARK else "*"
            assert state.board == before.board[:cell] + mark + before.board[cell + 1 :]
        else:
            assert state.board == flooded(rows, columns, state.layout, before.board, cell)
        hidden = sum(state.board.count(mark) for mark in "#F*")
        flags = "".join("*" if mark == "F" else "." for mark in state.board)
        cleared, marked, hit = hidden == mines, flags == state.layout, "*" in state.board
        won = cleared and (marked or not flag_all)
        assert transition.done == (won or hit or state.turn == cap)
        assert transition.outcome == (-1 if hit else 1 if won else 0 if state.turn == cap else None)
    assert rules.moves(state) == []
    completion = pytest.approx((rows * columns - hidden) / (rows * columns - mines))
    reached = {"success": won, "success_reveal": cleared, "success_flags": cleared and marked}
    assert transition.measures == {**reached, "completion": completion}


def test_a_move_is_a_word_and_a_cell_counted_from_1() -> None:
    read: dict[str, Any] = dict.fromkeys(
        ("reveal 3 12", " CLICK  3,12 ", "Open\t3\n12"), (REVEAL, 2, 11)
    )
    read |= dict.fromkeys(("flag 3 12", "MARK, 3, 12"), (MARK, 2, 11))
    unread = ("3 12", "reveal 3", "reveal 3 12 1", "reveal3 12", "reveal -3 12", "reveal ٣ 2")
    read |= dict.fromkeys(unread)
    assert {text: Minesweeper().move(text) for text in read} == read
