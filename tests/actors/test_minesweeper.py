"""The Minesweeper environment; reveals are checked by a flood fill that works on the whole grid
instead of a list of cells."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments import registry
from coppice.actors.environments.base import Transition
from coppice.actors.environments.minesweeper import environment as minesweeper
from coppice.actors.environments.minesweeper.environment import (
    MARK,
    REVEAL,
    MinesState,
    Minesweeper,
    revealed,
)
from coppice.wire.faults import DataFault
from tests import games

SEEDS = st.integers(0, 2**31)
LAYOUT = "*......*........"
"""4x4, mines in (1, 1) and (2, 4)."""
OPENED = "#11#111#..11...."
"""All safe cells are revealed but (1, 4)."""
SIZES = st.sampled_from([(5, 5, 5), (4, 4, 3), (3, 6, 4), (8, 8, 10), (6, 4, 9), (2, 9, 5)])


def numbered(rows: int, columns: int, layout: str) -> list[str]:
    """By cell: "*" for a mine, else what it shows when revealed."""
    lines, shown = [layout[at : at + columns] for at in range(0, len(layout), columns)], []
    for row, column in itertools.product(range(rows), range(columns)):
        block = [line[max(column - 1, 0) : column + 2] for line in lines[max(row - 1, 0) : row + 2]]
        around = "".join(block).count("*")
        shown.append("*" if lines[row][column] == "*" else str(around or "."))
    return shown


def flooded(rows: int, columns: int, layout: str, board: str, cell: int) -> str:
    """The board after the reveal of a safe cell: sweeps over the grid until no hidden cell touches
    a zero opened by it."""
    shown, after, opened, before = numbered(rows, columns, layout), list(board), {cell}, set[int]()
    after[cell] = shown[cell]
    while opened != before:
        before = set(opened)
        zeros = [divmod(other, columns) for other in opened if after[other] == "."]
        for at in range(rows * columns):
            row, column = divmod(at, columns)
            if after[at] == "#" and any(
                abs(r - row) <= 1 and abs(c - column) <= 1 for r, c in zeros
            ):
                after[at] = shown[at]
                opened.add(at)
    return "".join(after)


def small(board: str = "#" * 16, layout: str = LAYOUT, **more: Any) -> MinesState:
    return MinesState(4, 4, layout.count("*"), 0, board, layout, **more)


def game(**options: Any) -> Minesweeper:
    made = registry.load("minesweeper", {"rows": 4, "columns": 4, "mines": 2} | options)
    assert isinstance(made, Minesweeper)
    return made


def measures(success: float, reveal: float, flags: float, completion: float) -> Any:
    both = {"success_reveal": float(reveal), "success_flags": float(flags)}
    return {"success": float(success), **both, "completion": pytest.approx(completion)}


def play(rules: Minesweeper, state: MinesState, *moves: str) -> Transition:
    *before, last = games.play(rules, state, *moves)
    assert not any(transition.done for transition in before)
    return last


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
    size_options = {"rows": rows, "columns": columns, "mines": mines}
    rule = "flags" if flag_all else "reveal"
    rules = game(**size_options, centre_start=False, success_rule=rule, max_turns=cap)
    state = rules.initial(rules.task(seed))
    transition = Transition(state, "", False)
    hidden, cleared, marked, won = rows * columns, False, False, False
    while not transition.done:
        open_to = {REVEAL: "#", MARK: "#F"}
        assert rules.moves(state) == [
            (kind, *divmod(cell, columns))
            for kind, marks in open_to.items()
            for cell, mark in enumerate(state.board)
            if mark in marks
        ]
        kind, row, column = move = rng.choice(rules.moves(state))
        cell = row * columns + column
        before, transition = state, play(rules, state, rules.notation(move))
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
        hidden = state.board.count("#") + state.board.count("F") + state.board.count("*")
        flags = "".join("*" if mark == "F" else "." for mark in state.board)
        cleared, marked, hit = hidden == mines, flags == state.layout, "*" in state.board
        won = cleared and (marked or not flag_all)
        assert transition.done == (won or hit or state.turn == cap)
        assert transition.outcome == (-1 if hit else 1 if won else 0 if state.turn == cap else None)
    safe = rows * columns - mines
    assert rules.moves(state) == []
    completion = (rows * columns - hidden) / safe
    assert transition.measures == measures(won, cleared, cleared and marked, completion)


def test_by_the_rule_of_flags_every_mine_must_be_flagged_too() -> None:
    rules = game(success_rule="flags")
    assert rules.initial(rules.task(0)).flag_all
    cleared = play(rules, small(OPENED, flag_all=True), "reveal 1 4", "flag 1 1")
    assert not cleared.done
    won = play(rules, cleared.state, "flag 2 4")
    assert (won.done, won.outcome, won.measures) == (True, 1.0, measures(1, 1, 1, 1.0))
    lost = play(rules, cleared.state, "reveal 2 4")
    assert (lost.done, lost.outcome, lost.measures) == (True, -1.0, measures(0, 1, 0, 1.0))


@pytest.mark.parametrize(
    ("move", "outcome"), [("reveal 1 4", 1.0), ("flag 1 1", 0.0), ("reveal 1 1", -1.0)]
)
def test_the_last_turn_counts_as_lost_time_unless_it_decides(move: str, outcome: float) -> None:
    rules = game(max_turns=7)
    transition = play(rules, small(OPENED, turn=6), move)
    assert (transition.done, transition.outcome) == (True, outcome)
    assert transition.measures["success"] == (outcome == 1)
    assert play(rules, small(OPENED, turn=5), "flag 1 1").done is False


def test_a_move_is_a_word_and_a_cell_counted_from_1() -> None:
    for text in ("reveal 3 12", " CLICK  3,12 ", "Open\t3\n12"):
        assert Minesweeper().move(text) == (REVEAL, 2, 11), text
    for text in ("flag 3 12", "MARK, 3, 12"):
        assert Minesweeper().move(text) == (MARK, 2, 11), text
    for text in ("3 12", "reveal 3", "reveal 3 12 1", "reveal3 12", "reveal -3 12", "reveal ٣ 2"):
        assert Minesweeper().move(text) is None, text


def test_the_history_keeps_the_last_moves_with_their_result() -> None:
    rules = game(history=4)
    state = play(rules, small(), "flag 1 2", "flag 1 2", "flag 1 1", "reveal 4 4").state
    assert state.past[:2] == ("flag 1 2 flagged", "flag 1 2 unflagged")
    assert state.past[2:] == ("flag 1 1 flagged", "reveal 4 4 safe")
    assert play(rules, state, "reveal 2 4").state.past[-1] == "reveal 2 4 mine"
    assert "\n".join(state.past) in rules.prompt(rules.task(0), state)[0]["content"]
