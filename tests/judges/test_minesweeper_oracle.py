"""The Minesweeper oracle and its posterior; the referee lists every layout of a small board."""

import random
import statistics
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.minesweeper import environment
from coppice.actors.environments.minesweeper.environment import (
    MARK,
    REVEAL,
    MinesState,
    Minesweeper,
)
from coppice.judges.oracles.minesweeper import MinesweeperOracle, labels
from coppice.judges.oracles.posterior import Posterior, posterior
from coppice.wire.messages import JudgedTurn
from tests import games

Size = tuple[int, int, int]
SIZES = st.sampled_from(
    [(4, 4, 3), (4, 4, 6), (5, 5, 5), (3, 6, 4), (3, 6, 8), (1, 9, 3), (2, 8, 5)]
)
RANDOM = st.randoms(use_true_random=False)


def listed(
    rows: int, columns: int, mines: int, numbers: dict[int, int]
) -> tuple[int, dict[int, int]]:
    """How many layouts fit the numbers, and in how many each hidden cell holds a mine."""
    places = [divmod(cell, columns) for cell in range(rows * columns)]

    def touch(one: int, other: int) -> bool:
        return max(abs(a - b) for a, b in zip(places[one], places[other], strict=True)) == 1

    near = {cell: {c for c in range(rows * columns) if touch(c, cell)} for cell in numbers}
    hidden = [cell for cell in range(rows * columns) if cell not in numbers]
    layouts, mined = 0, dict.fromkeys(hidden, 0)
    for layout in combinations(hidden, mines):
        if all(len(near[cell].intersection(layout)) == number for cell, number in numbers.items()):
            layouts += 1
            for cell in layout:
                mined[cell] += 1
    return layouts, mined


def random_numbers(
    rows: int, columns: int, mines: int, share: float, rng: random.Random
) -> dict[int, int]:
    """The numbers of random safe cells: harder than what play leads to, as no region is open."""
    laid = set(rng.sample(range(rows * columns), mines))
    safe = [cell for cell in range(rows * columns) if cell not in laid]
    shown = rng.sample(safe, round(share * len(safe)))
    near = environment.neighbours(rows, columns)
    return {cell: sum(other in laid for other in near[cell]) for cell in shown}


def shown(board: str) -> dict[int, int]:
    return {
        cell: int(mark.replace(".", "0")) for cell, mark in enumerate(board) if mark not in "#F"
    }


@pytest.mark.second
@given(SIZES, st.floats(0, 1), RANDOM)
@settings(max_examples=120, deadline=None)
def test_the_posterior_is_that_of_all_layouts_listed(
    size: Size, share: float, rng: random.Random
) -> None:
    numbers = random_numbers(*size, share, rng)
    found = posterior(*size, numbers)
    assert found.exact
    assert (found.layouts, found.mined) == listed(*size, numbers)
    assert found.risks() == {cell: count / found.layouts for cell, count in found.mined.items()}
    assert all(found.certain(c) == (n == found.layouts) for c, n in found.mined.items())


@pytest.mark.parametrize("size", [(16, 30, 99), (30, 16, 99), (16, 16, 40)])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.3, 0.7])
def test_on_large_boards_the_risks_sum_to_the_number_of_mines(size: Size, share: float) -> None:
    rng = random.Random(f"{size[0]} {share}")
    for _ in range(3):
        found = posterior(*size, random_numbers(*size, share, rng))
        assert found.exact
        assert sum(found.mined.values()) == size[2] * found.layouts
        assert all(0 <= count <= found.layouts for count in found.mined.values())


def test_a_certain_mine_is_told_from_an_almost_certain_one() -> None:
    almost = Posterior({0: 10**30 - 1, 1: 10**30}, 10**30, True, 1)
    assert almost.risks() == {0: 1.0, 1: 1.0}
    assert (almost.certain(0), almost.certain(1)) == (False, True)


@pytest.mark.parametrize(
    ("mines", "numbers", "said"),
    [
        (1, {0: 2}, "no layout of 1 mines on 2x3 fits"),
        (1, {0: 1, 2: 1, 4: 2}, "fit"),
        (3, {1: 0}, "no layout"),
        (1, {1: 6}, "cell 1 shows 6"),
        (2, {1: 1, 4: 2}, "disagree on the mines"),
    ],
)
def test_numbers_that_no_layout_fits_are_refused(
    mines: int, numbers: dict[int, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        posterior(2, 3, mines, numbers)


@given(SIZES, RANDOM, st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_a_spent_budget_is_said_and_keeps_what_is_certain(
    size: Size, rng: random.Random, budget: int
) -> None:
    numbers = random_numbers(*size, 0.4, rng)
    exact, found = posterior(*size, numbers), posterior(*size, numbers, budget)
    assert found.exact == (exact.nodes <= budget)
    assert found == exact or (not found.exact and found.nodes == budget)
    assert found.mined.keys() == exact.mined.keys()
    assert all(0 <= count <= found.layouts for count in found.mined.values())
    for cell, risk in found.risks().items():
        assert exact.certain(cell) or not found.certain(cell)
        assert exact.mined[cell] == 0 or risk > 0


def test_without_budget_a_cell_has_the_mean_of_the_single_numbers_beside_it() -> None:
    numbers = {0: 1, 3: 1}  # the first sees the hidden cells 1 and 4, the other also 6 and 7
    found = posterior(4, 3, 4, numbers, budget=0)
    assert not found.exact
    both, free = (1 / 2 + 1 / 4) / 2, dict.fromkeys((2, 5, 8, 9, 10, 11), 4 / 10)
    assert found.risks() == pytest.approx({1: both, 4: both, 6: 1 / 4, 7: 1 / 4} | free)
    assert posterior(4, 3, 4, numbers).exact


FORCED = MinesState(1, 7, 2, 0, ".1#1###", "..*..*.")
"""Column 3 is a certain mine, column 5 safe, and one of columns 6 and 7 a mine."""
GUESS = MinesState(2, 4, 2, 0, "1###1###", ".*.....*")
"""Risks: one half in column 2, a quarter in columns 3 and 4."""
FLAGGED = MinesState(2, 4, 2, 0, "1#F#1###", ".*.....*")
SUICIDE = MinesState(1, 5, 1, 0, "F.1#F", "...*.")
"""The only cell without a flag is a certain mine."""
CLOSING = MinesState(1, 7, 2, 0, ".1#11##", "..*..*.")
"""Column 7 is the last safe cell."""


UNUSABLE = [[REVEAL, 0, 1], [MARK, 0, 1], [REVEAL, 0, 7], [REVEAL, 1, 4], [REVEAL, 0, -3]]
UNUSABLE += [[2, 0, 4], [0, 4], None]


def turn(state: MinesState, move: list[int] | None, budget: int = 25) -> JudgedTurn:
    plain, step = msgspec.to_builtins(state), state.turn + 1
    return JudgedTurn("minesweeper-1", [], "", "", step, budget, state=plain, move=move)


def scores(turns: list[JudgedTurn], **options: Any) -> list[dict[str, float]]:
    return games.scores(MinesweeperOracle(**options), turns)


@pytest.mark.parametrize(
    ("state", "move", "binary", "graded", "risk"),
    [
        (FORCED, [REVEAL, 0, 4], 1, 2, 0),
        (FORCED, [REVEAL, 0, 5], 0, 0, 0.5),
        (FORCED, [REVEAL, 0, 2], 0, 0, 1),
        (FORCED, [MARK, 0, 2], 1, 1, None),
        (FORCED, [MARK, 0, 5], 0, -1, None),  # a mine, but not certain
        *((FORCED, move, 0, -2, None) for move in UNUSABLE),
        (GUESS, [REVEAL, 1, 3], 1, 1, 0.25),  # a mine: the label is that of the risk
        (GUESS, [REVEAL, 0, 1], 0, 0, 0.5),
        (GUESS, [MARK, 0, 1], 0, -1, None),
        (FLAGGED, [REVEAL, 0, 3], 1, 1, 0.25),
        (FLAGGED, [REVEAL, 0, 2], 0, -2, None),
        (FLAGGED, [MARK, 0, 2], 0, -1, None),
        (SUICIDE, [REVEAL, 0, 3], 0, 0, 1),
        (SUICIDE, [MARK, 0, 3], 1, 1, None),
        (SUICIDE, [MARK, 0, 0], 0, -1, None),
    ],
)
def test_moves_on_hand_made_boards(
    state: MinesState, move: list[int] | None, binary: float, graded: float, risk: float | None
) -> None:
    share = {FORCED: 2 / 8, GUESS: 4 / 12, FLAGGED: 3 / 11, SUICIDE: 1 / 4}[state]
    columns = {"graded": graded, "exact": 1.0, "valid_share": share}
    columns |= {} if risk is None else {"risk": risk}
    assert scores([turn(state, move)]) == [{"reward": binary} | columns]
    assert scores([turn(state, move)], reward="graded") == [{"reward": graded} | columns]


@pytest.mark.parametrize(
    ("state", "move", "binary", "before", "last"),
    [
        (FORCED, [REVEAL, 0, 4], 1, 2, -2),
        (FORCED, [REVEAL, 0, 6], 0, 0, -2),
        (FORCED, [REVEAL, 0, 5], 0, 0, 0),  # a mine: lost, not out of turns
        (FORCED, [MARK, 0, 2], 1, 1, -2),
        (CLOSING, [REVEAL, 0, 6], 1, 2, 2),
        (msgspec.structs.replace(CLOSING, flag_all=True), [REVEAL, 0, 6], 1, 2, -2),
        (MinesState(1, 7, 2, 0, ".1F11#1", "..*..*.", True), [MARK, 0, 5], 1, 1, 1),
    ],
)
def test_running_out_of_turns_is_graded_as_such(
    state: MinesState, move: list[int], binary: float, before: float, last: float
) -> None:
    states = [msgspec.structs.replace(state, turn=used) for used in (5, 6)]
    made = scores([turn(one, move, budget=7) for one in states])
    assert [(each["reward"], each["graded"]) for each in made] == [(binary, before), (binary, last)]


def test_before_the_first_reveal_every_reveal_is_safe_and_no_flag_certain() -> None:
    rules = Minesweeper(centre_start=False)
    state = rules.initial(rules.task(0))
    made = scores([turn(state, list(move)) for move in rules.moves(state)])
    assert made[:25] == [{"reward": 1, "graded": 2, "risk": 0, "exact": 1, "valid_share": 0.5}] * 25
    assert made[25:] == [{"reward": 0, "graded": -1, "exact": 1, "valid_share": 0.5}] * 25
    (flagged,) = scores([turn(environment.played(state, (MARK, 2, 2)), [REVEAL, 0, 0])])
    assert flagged["valid_share"] == 24 / 49


@given(SIZES, st.integers(0, 2**31), RANDOM, st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_all_legal_moves_of_a_reached_state(
    size: Size, seed: int, rng: random.Random, plies: int
) -> None:
    """Binary is the least listed risk or a certain mine's flag; its mean is valid_share."""
    rows, columns, mines = size
    rules = Minesweeper(rows=rows, columns=columns, mines=min(mines, 5), centre_start=False)
    state = environment.played(rules.initial(rules.task(seed)), (REVEAL, rows // 2, columns // 2))
    for _ in range(plies):
        after = environment.played(state, rng.choice(rules.moves(state)))
        state = state if environment.all_revealed(after) or "*" in after.board else after
    layouts, mined = listed(rows, columns, state.mines, shown(state.board))
    unflagged = {cell: count for cell, count in mined.items() if state.board[cell] == "#"}
    least = min((count for count in unflagged.values() if count < layouts), default=-1)
    moves = rules.moves(state)
    turns = [turn(state, list(move)) for move in moves]
    made = scores(games.travelled(turns))
    for move, column in zip(moves, made, strict=True):
        cell = move[1] * columns + move[2]
        if move[0] == MARK:
            certain = unflagged.get(cell) == layouts
            expected: dict[str, float] = {"reward": certain, "graded": 1 if certain else -1}
        else:
            safest = unflagged[cell] == least
            value = 2 if unflagged[cell] == 0 else 1 if safest and least > 0 else 0
            expected = {"reward": safest, "graded": value, "risk": mined[cell] / layouts}
        share = sum(other["reward"] for other in made) / len(made)
        assert column == expected | {"exact": 1, "valid_share": pytest.approx(share)}


def test_a_spent_budget_is_a_column() -> None:
    (exact,) = scores([turn(GUESS, [REVEAL, 1, 1])])
    (spent,) = scores([turn(GUESS, [REVEAL, 1, 1])], budget=0)
    assert (exact["exact"], spent["exact"]) == (1, 0)
    assert 0 <= spent["risk"] <= 1


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"board": "........."},
        MinesState(2, 4, 1, 0, "#######", "*......."),
        MinesState(1, 3, 1, 0, "#1#", "*."),
        MinesState(1, 3, 0, 0, "...", "..."),
        MinesState(1, 3, 1, 0, "#1#", ""),
        MinesState(1, 3, 1, 0, "#2#", "*.."),
        msgspec.structs.replace(FORCED, over=True),
    ],
)
def test_a_turn_that_shows_no_game_is_a_data_fault(state: Any) -> None:
    assert games.refused(MinesweeperOracle(), msgspec.to_builtins(state))


@pytest.mark.second
def test_the_player_of_least_risk_wins_as_often_as_expected() -> None:
    """Expected exactly, over all 4,316 layouts and ties. Measured in methods.md 3.4: .785, .971."""
    rules, rng, ends = Minesweeper(), random.Random(11), []
    for seed in range(500):
        state = rules.initial(rules.task(seed))
        while "*" not in state.board and not environment.all_revealed(state):
            state = environment.played(
                state, (REVEAL, *divmod(rng.choice(sorted(labels(state).safest)), 5))
            )
        ends.append(rules.lost(state))
    for name, expected in (("success", 0.799), ("completion", 0.972)):
        found = [end[name] for end in ends]
        error = statistics.stdev(found) / len(found) ** 0.5
        assert statistics.mean(found) == pytest.approx(expected, abs=4 * error), name
