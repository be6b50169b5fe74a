"""Tic-Tac-Toe against an opponent (methods.md 3.2). A board is nine characters of "XO.", row by
row; X moves first. Actions count cells from 1, moves ``(cell,)`` from 0."""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec

from coppice.actors.environments.base import Task, Tools, Transition
from coppice.actors.environments.game import Game
from coppice.common.numbers import Natural, Share
from coppice.wire.faults import InfrastructureFault

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
RANDOM = "random"
"""The opponent that the environment itself plays. Every other name is a service."""
MOST_OPENING = 3
"""The most plies of an opening. After a fourth ply the opponent could win before the policy has
acted."""

_CELL = re.compile(r"\s*([1-9])\s*")

# ---------------------------------------------------------------------------------- the rules


def to_move(board: str) -> str:
    """Return the mark that would move next, even after the end of the game."""
    return "X" if board.count("X") == board.count("O") else "O"


def winner(board: str) -> str:
    """Return the mark that has a line, "" when neither has."""
    lines = (board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c])
    return next(lines, "")


def legal_cells(board: str) -> tuple[int, ...]:
    """Return the cells that may be played in ascending order, none when the game is over."""
    return () if winner(board) else tuple(cell for cell, mark in enumerate(board) if mark == ".")


def play(board: str, cell: int) -> str:
    """Return the board after the side to move has taken ``cell``, which must be legal."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


def returns(board: str, mark: str) -> float:
    """Return the result of a finished game for ``mark``: 1, 0 or -1 (a win, a draw, a loss)."""
    won = winner(board)
    return 0.0 if not won else 1.0 if won == mark else -1.0


@cache  # 5,478 boards
def value(board: str) -> int:
    """Return the exact minimax value for the side to move: 1 for a win, 0 for a draw, -1 for a
    loss."""
    if winner(board):
        return -1  # the other side won with the last move
    return max((-value(play(board, cell)) for cell in legal_cells(board)), default=0)


@cache
def optimal(board: str) -> tuple[int, ...]:
    """Return the legal cells that keep the minimax value, in ascending order."""
    return tuple(cell for cell in legal_cells(board) if -value(play(board, cell)) == value(board))


# ----------------------------------------------------------------------------- the environment


class TicTacToeState(msgspec.Struct, frozen=True):
    """A position of an episode. me: the policy's mark. opponent: the other player's name. past: the
    last moves of the policy, as written."""

    board: str
    me: str
    opponent: str
    past: tuple[str, ...] = ()


class TicTacToe(Game):
    """The game for one policy. prompt, history, stop_at_action: see ``Game``.

    opponents: by name, the weight with which an episode draws its opponent: "random", or the name
    of a served player. The default is half "tictactoe_mcts", half "random" (methods.md 3.2).
    second: the share of the episodes that the opponent begins. opening: the number of random plies
    before the first player acts; after an odd number this player has O.
    """

    name = "tictactoe"
    folder = Path(__file__).parent
    measured: Sequence[str] = ("success", "draw")

    def __init__(
        self,
        *,
        prompt: str = "tictactoe",
        history: Natural = 0,
        stop_at_action: bool = True,
        opponents: dict[str, float] | None = None,
        second: Share = 0.5,
        opening: Annotated[int, msgspec.Meta(ge=0, le=MOST_OPENING)] = 0,
    ):
        super().__init__(prompt, history, stop_at_action)
        weights = {"tictactoe_mcts": 0.5, RANDOM: 0.5} if opponents is None else opponents
        if "" in weights or not 0 < sum(weights.values()) < inf or min(weights.values()) < 0:
            wish = "expected player names with weights >= 0, not all of them 0"
            raise ValueError(f"opponents = {weights}: {wish}")
        self.opponents = {name: weights[name] for name in sorted(weights)}
        self.second, self.opening = second, opening

    def initial(self, task: Task) -> TicTacToeState:
        """Return the position after the opening, which may be the opponent's turn."""
        rng = random.Random(f"tictactoe/{task.seed}")
        opponent = rng.choices(list(self.opponents), list(self.opponents.values()))[0]
        begins = rng.random() >= self.second
        board = EMPTY
        for _ in range(self.opening):
            board = play(board, rng.choice(legal_cells(board)))
        return TicTacToeState(board, to_move(board) if begins else _other(to_move(board)), opponent)

    async def open(self, state: TicTacToeState, tools: Tools) -> TicTacToeState:
        if to_move(state.board) == state.me:
            return state
        return msgspec.structs.replace(state, board=await _reply(state, tools))

    def view(self, state: TicTacToeState) -> dict[str, str]:
        """{board}: 3 lines. {row}: the board in one line. {legal}: the numbers of the free cells.
        {me}, {opponent_mark}: X or O."""
        return {
            "board": "\n".join(state.board[i : i + 3] for i in (0, 3, 6)),
            "row": state.board,
            "legal": " ".join(self.notation(move) for move in self.moves(state)),
            "me": state.me,
            "opponent_mark": _other(state.me),
        }

    def move(self, text: str) -> tuple[int, ...] | None:
        match = _CELL.fullmatch(text)
        return (int(match[1]) - 1,) if match else None

    def moves(self, state: TicTacToeState) -> list[tuple[int, ...]]:
        return [(cell,) for cell in legal_cells(state.board)]

    def notation(self, move: tuple[int, ...]) -> str:
        return str(move[0] + 1)

    async def apply(self, state: TicTacToeState, move: tuple[int, ...], tools: Tools) -> Transition:
        """Play the policy's move and, if the game goes on, the opponent's. Raises
        InfrastructureFault when the opponent's is not legal."""
        past = self.remember(state.past, self.notation(move))
        after = msgspec.structs.replace(state, board=play(state.board, move[0]), past=past)
        if legal_cells(after.board):
            after = msgspec.structs.replace(after, board=await _reply(after, tools))
        if legal_cells(after.board):
            return Transition(after, "", False)
        outcome = returns(after.board, state.me)
        measures = {"success": float(outcome > 0), "draw": float(outcome == 0)}
        return Transition(after, "", True, outcome, measures)

    def lost(self, state: TicTacToeState) -> dict[str, float]:
        return {"success": 0.0, "draw": 0.0}

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return the measures of ``Game``, optimal (per turn, if the oracle gives it), and the
        return by side and by opponent."""
        results, start = super().measures(task, turns), self.initial(task)
        if optimal_turns := [turn["optimal"] for turn in turns if "optimal" in turn]:
            results["optimal"] = optimal_turns
        results["return_first" if start.me == "X" else "return_second"] = results["return"]
        if len(self.opponents) > 1:
            results[f"return_vs_{start.opponent}"] = results["return"]
        return results


def _other(mark: str) -> str:
    return "O" if mark == "X" else "X"


async def _reply(state: TicTacToeState, tools: Tools) -> str:
    free = legal_cells(state.board)
    if state.opponent == RANDOM:
        return play(state.board, tools.rng.choice(free))
    move = tuple(await tools.play(state.opponent, state))
    if len(move) != 1 or move[0] not in free:
        raise InfrastructureFault(
            f"player {state.opponent} played {move} on {state.board}: expected one free cell of"
            f" {free}, counted from 0"
        )
    return play(state.board, move[0])
