"""The oracle and the opponents of Tic-Tac-Toe."""

import asyncio
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.tictactoe.environment import (
    EMPTY,
    TicTacToeState,
    legal_cells,
    optimal,
    play,
    to_move,
)
from coppice.judges.base import checked
from coppice.judges.oracles.tictactoe import MctsPlayer, MinimaxPlayer, Search, TicTacToeOracle
from coppice.judges.serve import make_worker
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Judgement


@cache
def live() -> tuple[str, ...]:
    """The 4,520 boards of legal play in which a move is due."""
    seen, open_ = {EMPTY}, [EMPTY]
    while open_:
        board = open_.pop()
        following = {play(board, cell) for cell in legal_cells(board)} - seen
        seen |= following
        open_ += following
    return tuple(sorted(board for board in seen if legal_cells(board)))


def plain(board: str) -> dict[str, Any]:
    return msgspec.to_builtins(TicTacToeState(board, to_move(board), "random"))


def turn(board: str, move: list[int] | None) -> JudgedTurn:
    return JudgedTurn("", [], "", "", 1, 5, state=plain(board), move=move)


def scored(oracle: TicTacToeOracle, turns: list[JudgedTurn]) -> list[Judgement]:
    made = checked(oracle, turns, asyncio.run(oracle.score(turns)))
    assert not any(judgement.invalid for judgement in made)
    return made


boards = st.builds(lambda n: live()[n], st.integers(0, 4519))
SEARCHED = cache(Search.values)
"""Searches that several tests may share."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulations", "tolerance", "measured", "table"),
    [
        (10, 0.0, (0.946, 0.596, 0.240), (0.955, 0.622, 0.219)),
        (100, 0.0, (0.966, 0.595, 0.234), (0.987, 0.630, 0.203)),
        (1000, 0.0, (0.994, 0.613, 0.214), (1.000, 0.649, 0.186)),
        (1000, 0.1, (0.990, 0.817, 0.105), (1.000, 0.853, 0.078)),
        (1000, 0.2, (0.976, 0.905, 0.064), (0.991, 0.942, 0.035)),
    ],
)
def test_precision_recall_and_error_are_those_of_methods_3_2(
    simulations: int, tolerance: float,
    measured: tuple[float, ...], table: tuple[float, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One search of each of the 4,520 boards, so that only the search is random.

    measured: the mean of three seeds, which differ by up to .003; the band is twice that. table: of
    methods.md, by another UCT on 120 to 250 of the boards; the band is three standard errors of
    such a sample of 120.
    """
    monkeypatch.setattr(Search, "values", SEARCHED)
    oracle = TicTacToeOracle(simulations=simulations, tolerance=tolerance)
    labelled = [set(oracle.valid(b, n)) for n, b in enumerate(live())]
    best, legal = [set(optimal(b)) for b in live()], [len(legal_cells(b)) for b in live()]
    both = [len(v & o) for v, o in zip(labelled, best, strict=True)]
    wrong = [len(v ^ o) for v, o in zip(labelled, best, strict=True)]
    ratios = ((both, list(map(len, labelled))), (both, list(map(len, best))), (wrong, legal))
    for (part, whole), mine, theirs in zip(ratios, measured, table, strict=True):
        ratio = sum(part) / sum(whole)
        spread = sum((p - ratio * w) ** 2 for p, w in zip(part, whole, strict=True)) / len(whole)
        error = (spread / 120) ** 0.5 / (sum(whole) / len(whole))
        assert ratio == pytest.approx(mine, abs=0.006)
        assert ratio == pytest.approx(theirs, abs=3 * error)


def test_a_proven_result_replaces_the_mean() -> None:
    drawn = "XOXXO.O.."  # X must take 8; after 6 or 9 O wins there
    assert optimal(drawn) == (7,)
    assert Search(solve=True).values(drawn, 0) == {5: -1.0, 7: 0.0, 8: -1.0}
    means = Search(solve=False).values(drawn, 0)
    assert -1 < means[5] < 0


def test_cells_never_tried_have_no_value() -> None:
    values = Search(simulations=4).values(EMPTY, 0)
    assert len(values) == 3
    assert all(Search(simulations=2).values(board, n) for n, board in enumerate(live()))


@given(boards, st.integers(-2, 10) | st.none())
@settings(deadline=None)
def test_a_move_is_rewarded_when_it_is_in_the_valid_set_and_what_is_no_legal_move_never(
    board: str, cell: int | None
) -> None:
    oracle = TicTacToeOracle(simulations=30, rollouts=2, seed=5)
    (judgement,) = scored(oracle, [turn(board, None if cell is None else [cell])])
    valid = oracle.valid(board, 5)
    assert judgement.scores == {
        "reward": float(cell in valid),
        "optimal": float(cell in optimal(board)),
        "valid_share": len(valid) / len(legal_cells(board)),
    }
    assert valid and set(valid) <= set(legal_cells(board))
    assert judgement.explanation.endswith(": " + " ".join(str(c + 1) for c in valid))


def test_kind_minimax_rewards_exactly_the_optimal_moves() -> None:
    oracle = TicTacToeOracle(kind="minimax")
    turns = [turn(board, [cell]) for board in live()[::20] for cell in legal_cells(board)]
    for asked, judgement in zip(turns, scored(oracle, turns), strict=True):
        assert asked.move is not None
        board = asked.state["board"]
        right = float(asked.move[0] in optimal(board))
        share = len(optimal(board)) / len(legal_cells(board))
        assert judgement.scores == {"reward": right, "optimal": right, "valid_share": share}


def test_each_search_draws_anew_from_the_oracles_seed() -> None:
    def sets(seed: int) -> list[str]:
        oracle = TicTacToeOracle(simulations=20, rollouts=1, tolerance=0, seed=seed)
        turns = [turn(EMPTY, [4])] * 4
        return [j.explanation for _ in range(5) for j in scored(oracle, turns)]

    assert sets(1) == sets(1)
    assert len(set(sets(1))) > 5
    assert sets(1) != sets(50)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (plain("XXXOO...."), "a game that is on"),
        (plain("XOXXOOOXX"), "a game that is on"),
        (plain("XX......."), "X having begun"),
        (plain("O........"), "X having begun"),
        (plain("X"), "nine characters"),
        (plain("Y........"), "of 'XO.'"),
        ({"me": "X"}, "is not one of tictactoe"),
        (None, "is not one of tictactoe"),
    ],
)
async def test_a_state_in_which_no_move_is_due_is_a_data_fault(state: Any, message: str) -> None:
    with pytest.raises(DataFault, match=message):
        await TicTacToeOracle().score([JudgedTurn("", [], "", "", 1, 5, state=state, move=[0])])
    for player in (MctsPlayer(), MinimaxPlayer()):
        with pytest.raises(DataFault, match=message):
            await player.play(state, 0)


def test_an_option_of_the_search_is_refused_with_minimax() -> None:
    with pytest.raises(ValueError, match="does not search"):
        make_worker("tictactoe", {"kind": "minimax", "tolerance": 0.0})


@pytest.mark.second
@given(boards, st.integers(0, 2**63))
@settings(deadline=None)
def test_players_play_legal_moves_and_the_same_one_for_the_same_seed(board: str, seed: int) -> None:
    quick = MctsPlayer(simulations=20, rollouts=1)
    for player in (quick, MctsPlayer(simulations=2, solve=False), MinimaxPlayer()):
        moves = {asyncio.run(player.play(plain(board), seed)) for _ in range(2)}
        assert len(moves) == 1
        assert moves <= {(cell,) for cell in legal_cells(board)}


@pytest.mark.second
def test_the_strong_opponent_plays_optimally_on_every_board() -> None:
    search = MctsPlayer().search
    assert search == Search(simulations=1000, rollouts=10, uct_c=2.0, solve=True)
    assert all(search.root(b, n).best_child().action in optimal(b) for n, b in enumerate(live()))
