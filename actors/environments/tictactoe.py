"""Tic-Tac-Toe against an opponent (methods.md 3.2).

Action: ``<action>N</action>``, N a cell number 1..9, row by row from the top left (the v2 format, methods.md 3.1). Inside the program
a move is ``(cell,)`` with the cell counted from 0. A board is a string of nine characters of "XO."; X moves first.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite

import msgspec

from actors.environments.base import Task, Tools, Transition
from actors.environments.game import Game
from wire.faults import InfrastructureFault

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
RANDOM = "random"
"""The opponent that is played in the environment; every other name is a service."""
MOST_OPENING = 3
"""Plies. After a fourth the opponent could win before the policy has acted."""

_CELL = re.compile(r"\s*([1-9])\s*")

# ------------------------------------------------------------------------------------------ the rules


def to_move(board: str) -> str:
    """The mark that moves next, also after the end."""
    return "X" if board.count("X") == board.count("O") else "O"


def winner(board: str) -> str:
    """The mark that has a line, "" when none has."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), "")


def legal_cells(board: str) -> tuple[int, ...]:
    """The cells that may be played, ascending; none when the game is over."""
    return () if winner(board) else tuple(cell for cell, mark in enumerate(board) if mark == ".")


def play(board: str, cell: int) -> str:
    """The board after the side to move has taken ``cell``, which must be legal."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


def returns(board: str, mark: str) -> float:
    """What a finished game gives ``mark``: 1 won, 0 drawn, -1 lost."""
    won = winner(board)
    return 0.0 if not won else 1.0 if won == mark else -1.0


@cache  # 5,478 boards
def value(board: str) -> int:
    """The exact minimax value for the side to move: 1 won, 0 drawn, -1 lost."""
    if winner(board):
        return -1  # by the move before
    return max((-value(play(board, cell)) for cell in legal_cells(board)), default=0)


@cache
def optimal(board: str) -> tuple[int, ...]:
    """The legal cells that keep the minimax value, ascending."""
    return tuple(cell for cell in legal_cells(board) if -value(play(board, cell)) == value(board))


# ------------------------------------------------------------------------------------------ the environment


class State(msgspec.Struct, frozen=True):
    """A position of an episode. me: the policy's mark; opponent: who plays the other; past: the last moves of the policy, as written."""

    board: str
    me: str
    opponent: str
    past: tuple[str, ...] = ()


class TicTacToe(Game):
    """The game for one policy. prompt, history, boxed, stop_at_action: see ``Game``.

    opponents: weights from which each episode draws its opponent: "random", or the name of a served player; by default half
    "tictactoe_mcts", half "random" (methods.md 3.2). second: share of the episodes that the opponent begins. opening: random plies,
    0 to 3, before the one who begins acts, so that after an odd number the first to act plays O.
    """

    name = "tictactoe"

    def __init__(
        self,
        *,
        prompt: str = "tictactoe",
        history: int = 0,
        boxed: bool = False,
        stop_at_action: bool = True,
        opponents: dict[str, float] | None = None,
        second: float = 0.5,
        opening: int = 0,
    ):
        super().__init__(prompt, history, boxed, stop_at_action)
        weights = {"tictactoe_mcts": 0.5, RANDOM: 0.5} if opponents is None else opponents
        total = sum(weights.values())
        if "" in weights or not all(w >= 0 for w in weights.values()) or not (isfinite(total) and total > 0):
            raise ValueError(f"opponents = {weights}: expected player names with weights >= 0, one of them above 0")
        if not 0 <= second <= 1:
            raise ValueError(f"second = {second}: expected a share of the episodes, 0 to 1")
        if not 0 <= opening <= MOST_OPENING:
            raise ValueError(f"opening = {opening}: expected 0 to {MOST_OPENING} plies")
        self.opponents = {name: weights[name] for name in sorted(weights)}
        self.second, self.opening = second, opening

    def initial(self, task: Task) -> State:
        """The position after the opening; the opponent's turn when it begins."""
        rng = random.Random(f"tictactoe/{task.seed}")
        opponent = rng.choices(list(self.opponents), list(self.opponents.values()))[0]
        begins = rng.random() >= self.second
        board = EMPTY
        for _ in range(self.opening):
            board = play(board, rng.choice(legal_cells(board)))
        return State(board, to_move(board) if begins else _other(to_move(board)), opponent)

    async def open(self, state: State, tools: Tools) -> State:
        """The position in which the policy acts first."""
        if to_move(state.board) == state.me:
            return state
        return msgspec.structs.replace(state, board=await _reply(state, tools))

    def view(self, state: State) -> dict[str, str]:
        """board: 3 lines; row: the board in one line; legal: the free cells' numbers; me and opponent_mark: X or O."""
        return {
            "board": "\n".join(state.board[i : i + 3] for i in (0, 3, 6)),
            "row": state.board,
            "legal": " ".join(self.notation(move) for move in self.moves(state)),
            "me": state.me,
            "opponent_mark": _other(state.me),
        }

    def move(self, text: str) -> tuple[int, ...] | None:
        """A cell number 1..9, counted from 0 inside."""
        found = _CELL.fullmatch(text)
        return (int(found[1]) - 1,) if found else None

    def legal(self, state: State, move: tuple[int, ...]) -> bool:
        """Is the game on and the cell free?"""
        return move in self.moves(state)

    def moves(self, state: State) -> list[tuple[int, ...]]:
        """The free cells, ascending."""
        return [(cell,) for cell in legal_cells(state.board)]

    def notation(self, move: tuple[int, ...]) -> str:
        """The cell's number, 1..9."""
        return str(move[0] + 1)

    async def apply(self, state: State, move: tuple[int, ...], tools: Tools) -> Transition:
        """The policy's move, then the opponent's while the game goes on. Raises InfrastructureFault when that is not legal."""
        past = self.remember(state.past, self.notation(move))
        after = msgspec.structs.replace(state, board=play(state.board, move[0]), past=past)
        if legal_cells(after.board):
            after = msgspec.structs.replace(after, board=await _reply(after, tools))
        if legal_cells(after.board):
            return Transition(after, "", False)
        outcome = returns(after.board, state.me)
        return Transition(after, "", True, outcome, {"success": float(outcome > 0), "draw": float(outcome == 0)})

    def lost(self, state: State) -> dict[str, float]:
        """Neither won nor drawn."""
        return {"success": 0.0, "draw": 0.0}

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Those of ``Game``, draw, optimal (a turn, where the oracle says it), and the return again by side and by opponent."""
        made, start = super().measures(task, turns), self.initial(task)
        made |= {"draw": [turns[-1]["draw"]]} if "draw" in turns[-1] else {}
        made |= {"optimal": best} if (best := [turn["optimal"] for turn in turns if "optimal" in turn]) else {}
        made |= {"return_first" if start.me == "X" else "return_second": made["return"]}
        return made | ({f"return_vs_{start.opponent}": made["return"]} if len(self.opponents) > 1 else {})


def _other(mark: str) -> str:
    return "O" if mark == "X" else "X"


async def _reply(state: State, tools: Tools) -> str:
    """The board after the opponent's move."""
    free = legal_cells(state.board)
    if state.opponent == RANDOM:
        return play(state.board, tools.rng.choice(free))
    move = tuple(await tools.play(state.opponent, state))
    if len(move) != 1 or move[0] not in free:
        raise InfrastructureFault(
            f"player {state.opponent} played {move} on {state.board}: expected one free cell of {free}, counted from 0"
        )
    return play(state.board, move[0])
