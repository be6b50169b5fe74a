"""The Tic-Tac-Toe environment; OpenSpiel is the referee of its rules."""

import asyncio
import random
from collections import Counter
from typing import Any

import pyspiel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.actors.environments.base import Tools, Transition
from coppice.actors.environments.tictactoe.environment import (
    TicTacToe,
    TicTacToeState,
    legal_cells,
    optimal,
    returns,
    to_move,
    value,
)
from coppice.wire.faults import InfrastructureFault

GAME = pyspiel.load_game("tic_tac_toe")


class Table(Tools):
    """Tools whose opponent plays ``reply``, or without one a random legal move."""

    def __init__(self, reply: tuple[Any, ...] | None = None, seed: int = 0):
        self.rng, self.reply, self.asked = random.Random(seed), reply, []

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        self.asked.append(player)
        return (self.rng.choice(legal_cells(state.board)),) if self.reply is None else self.reply


def board_of(referee: Any) -> str:
    return str(referee).replace("\n", "").upper()


seeds = st.integers(0, 2**63)


def test_openspiel_agrees_on_every_board_about_turn_moves_end_returns_and_minimax_value() -> None:
    values: dict[str, float] = {}

    def walk(referee: Any) -> float:
        """The value for X by brute force over OpenSpiel's states."""
        board = board_of(referee)
        if board in values:
            return values[board]
        assert list(legal_cells(board)) == referee.legal_actions()
        if referee.is_terminal():
            assert [returns(board, "X"), returns(board, "O")] == referee.returns()
            best = referee.returns()[0]
        else:
            mover = referee.current_player()
            assert to_move(board) == "XO"[mover]
            after = {cell: walk(referee.child(cell)) for cell in referee.legal_actions()}
            best = min(after.values()) if mover else max(after.values())
            assert optimal(board) == tuple(cell for cell in after if after[cell] == best)
        assert value(board) == (best if to_move(board) == "X" else -best)
        values[board] = best
        return best

    assert walk(GAME.new_initial_state()) == 0
    live = [board for board in values if legal_cells(board)]
    assert (len(values), len(live)) == (5478, 4520)
    assert Counter(map(to_move, live)) == {"X": 2423, "O": 2097}
    good = sum(len(optimal(board)) / len(legal_cells(board)) for board in live)
    assert good / 4520 == pytest.approx(0.580, abs=5e-4)


@given(seeds, st.lists(st.integers(0, 8), min_size=9, max_size=9), st.booleans(), st.integers(0, 3))
def test_an_episode_follows_openspiel_to_its_end(
    seed: int, choices: list[int], served: bool, opening: int
) -> None:
    environment = TicTacToe(opponents={"rival" if served else "random": 1}, opening=opening)
    table = Table(seed=seed)
    task = environment.task(seed)
    state = environment.initial(task)
    assert 9 - state.board.count(".") == opening
    state = asyncio.run(environment.open(state, table))
    referee = GAME.new_initial_state()
    marks = {mark: [c for c in range(9) if state.board[c] == mark] for mark in "XO"}
    for ply in range(9 - state.board.count(".")):
        referee.apply_action(marks["XO"[ply % 2]][ply // 2])
    transition = Transition(state, "", False)
    for choice in choices:
        assert to_move(state.board) == state.me == "XO"[referee.current_player()]
        assert board_of(referee) == state.board
        assert [cell for (cell,) in environment.moves(state)] == referee.legal_actions()
        move = environment.moves(state)[choice % len(environment.moves(state))]
        action = environment.read(state, f"<action>{environment.notation(move)}</action>")
        assert (action.kind, action.move) == ("move", move)
        before, transition = state, asyncio.run(environment.step(state, action, table))
        referee.apply_action(move[0])
        state = transition.state
        changed = [c for c in range(9) if state.board[c] != before.board[c] and c != move[0]]
        assert len(changed) == (not referee.is_terminal())
        for cell in changed:
            referee.apply_action(cell)
        assert board_of(referee) == state.board
        assert transition.done == referee.is_terminal()
        assert transition.observation == ""
        if transition.done:
            break
        assert (transition.outcome, transition.measures) == (None, {})
    assert transition.done
    outcome = referee.returns()["XO".index(state.me)]
    assert transition.outcome == outcome
    assert transition.measures == {"success": float(outcome == 1), "draw": float(outcome == 0)}
    assert set(table.asked) <= ({"rival"} if served else set())


@pytest.mark.parametrize("reply", [(), (4,), (9,), (0, 1), ("a",)])
async def test_an_opponents_illegal_move_is_an_infrastructure_fault(reply: tuple[Any, ...]) -> None:
    environment, table = TicTacToe(), Table(reply)
    said = r"player rival played .* on X?\.\.\.\.?XO\.\.\."
    with pytest.raises(InfrastructureFault, match=said):
        await environment.open(TicTacToeState("....XO...", "O", "rival"), table)


def test_opponents_and_sides_are_drawn_with_their_shares() -> None:
    count = 4000  # a share's standard error is at most .008: the bands are four of them

    uneven = TicTacToe(opponents={"a": 3, "b": 1, "c": 0}, second=0.2)
    states = [uneven.initial(uneven.task(n)) for n in range(count)]
    drawn = Counter((state.opponent, state.me) for state in states)
    expected = {("a", "X"): 0.6, ("a", "O"): 0.15, ("b", "X"): 0.2, ("b", "O"): 0.05}
    assert {key: n / count for key, n in drawn.items()} == pytest.approx(expected, abs=0.032)
