"""Tic-Tac-Toe: the oracle that rewards moves, and the opponents (methods.md 3.2). Moves are cells counted from 0.

The search is OpenSpiel's UCT with random rollouts: about 7 ms for 1,000 simulations of 10 rollouts on one core. It keeps Python's
lock while it searches, so a process gains nothing from several searches at once; serve more processes for more.
"""

import asyncio
import random
from itertools import count
from math import isfinite
from typing import Any, Literal

import msgspec
import pyspiel

from actors.environments.tictactoe import State, legal_cells, optimal, to_move
from judges.base import Judge
from judges.players import Player
from wire.faults import DataFault
from wire.messages import JudgedTurn, Judgement

_GAME = pyspiel.load_game("tic_tac_toe")
_MEMORY_MB = 64
"""More than a search needs: it has at most 9 nodes a simulation, of about 100 bytes."""
_SLACK = 1e-9
"""Means that are equal but for rounding are equal."""


class Search(msgspec.Struct, frozen=True):
    """Options of UCT. rollouts: random games per leaf; uct_c: weight of exploration; solve: back up proven results exactly."""

    simulations: int = 1000
    rollouts: int = 10
    uct_c: float = 2.0
    solve: bool = False

    def __post_init__(self) -> None:
        if self.simulations < 2:
            raise ValueError(f"simulations = {self.simulations}: expected 2 or more (the first only opens the root)")
        if self.rollouts < 1:
            raise ValueError(f"rollouts = {self.rollouts}: expected 1 or more random games per leaf")
        if not (isfinite(self.uct_c) and self.uct_c >= 0):
            raise ValueError(f"uct_c = {self.uct_c}: expected 0 or a positive number")

    def root(self, board: str, seed: int) -> Any:
        """The searched root of ``board``, a game that is on; ``seed`` decides all randomness."""
        rng = random.Random(seed)
        evaluator = pyspiel.RandomRolloutEvaluator(self.rollouts, rng.getrandbits(31))
        bot = pyspiel.MCTSBot(
            _GAME, evaluator, self.uct_c, self.simulations, _MEMORY_MB, self.solve, rng.getrandbits(31), False
        )
        return bot.mcts_search(_position(board))

    def values(self, board: str, seed: int) -> dict[int, float]:
        """Mean backed-up return, in [-1, 1] for the side to move, of each cell tried; with ``solve`` a proven result instead."""
        tried = (child for child in self.root(board, seed).children if child.explore_count)
        return {
            child.action: child.outcome[child.player] if child.outcome else child.total_reward / child.explore_count
            for child in tried
        }


def _position(board: str) -> Any:
    """OpenSpiel's state: the marks in any order of turns lead there, as no part of an unfinished board has a line."""
    state = _GAME.new_initial_state()
    cells = {mark: [cell for cell, held in enumerate(board) if held == mark] for mark in "XO"}
    for ply in range(9 - board.count(".")):
        state.apply_action(cells["XO"[ply % 2]][ply // 2])
    return state


def _read(state: Any) -> str:
    """The board of a state in plain values. Raises DataFault unless it is one in which a move is due."""
    try:
        board = msgspec.convert(state, State).board
    except msgspec.ValidationError as error:
        raise DataFault(f"state {state!r} is not one of tictactoe: {error}") from None
    fair = len(board) == 9 and set(board) <= set("XO.") and board.count("X") - board.count("O") in (0, 1)
    if not fair or not legal_cells(board):
        raise DataFault(f"board {board!r}: expected nine characters of 'XO.', X having begun, and a game that is on")
    return board


class TicTacToeOracle(Judge):
    """Rewards a move in the valid set: within ``tolerance`` of the best value that the search finds (methods.md 3.2).

    Columns: reward, 1.0 for a valid move, 0.0 for any other and for what is no legal move; optimal, the same by exact minimax, for
    the log; valid_share, valid moves / legal moves. kind: "mcts", or "minimax" for exact values, which takes no other option.
    tolerance: of returns in [-1, 1]; 0 is the paper's arg max. simulations, rollouts, uct_c, solve: see ``Search``. seed: of the
    first search; every search draws anew, so that a position's error is not the same each time.
    """

    name = "tictactoe"
    environments = ("tictactoe",)
    columns = ("reward", "optimal", "valid_share")
    concurrency = 1
    batch = 8

    def __init__(
        self,
        *,
        kind: Literal["mcts", "minimax"] = "mcts",
        simulations: int = 1000,
        rollouts: int = 10,
        tolerance: float = 0.1,
        uct_c: float = 2.0,
        solve: bool = False,
        seed: int = 0,
    ):
        if kind not in ("mcts", "minimax"):
            raise ValueError(f"kind = {kind!r}: expected one of 'mcts', 'minimax'")
        self.search = Search(simulations, rollouts, uct_c, solve)
        if not 0 <= tolerance <= 2:
            raise ValueError(f"tolerance = {tolerance}: expected 0 to 2, the width of the range of returns")
        if kind == "minimax" and (self.search, tolerance, seed) != (Search(), 0.1, 0):
            raise ValueError("kind = 'minimax' does not search: leave out simulations, rollouts, tolerance, uct_c, solve and seed")  # fmt: skip
        self.kind, self.tolerance, self._seeds = kind, tolerance, count(seed)

    def valid(self, board: str, seed: int) -> tuple[int, ...]:
        """The valid cells of a game that is on, ascending."""
        if self.kind == "minimax":
            return optimal(board)
        values = self.search.values(board, seed)
        least = max(values.values()) - self.tolerance - _SLACK
        return tuple(sorted(cell for cell, mean in values.items() if mean >= least))

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """Raises DataFault for a state in which no move is due."""
        seeds = [next(self._seeds) for _ in turns]
        return await asyncio.to_thread(lambda: list(map(self._judge, turns, seeds)))

    def _judge(self, turn: JudgedTurn, seed: int) -> Judgement:
        board = _read(turn.state)
        valid = self.valid(board, seed)
        cell = turn.move[0] if turn.move is not None and len(turn.move) == 1 else None
        return Judgement(
            {
                "reward": float(cell in valid),
                "optimal": float(cell in optimal(board)),
                "valid_share": len(valid) / len(legal_cells(board)),
            },
            explanation=f"{to_move(board)} to move on {board}, valid cells (1 to 9): {' '.join(str(c + 1) for c in valid)}",
        )


class MctsPlayer(Player):
    """Plays the move that the search tried most, a proven win first. By default the strong opponent of methods.md 3.2.

    name: the service is ``player.<name>``, so that one run can serve several strengths. Other options: see ``Search``.
    """

    name = "tictactoe_mcts"

    def __init__(
        self,
        *,
        simulations: int = 1000,
        rollouts: int = 10,
        uct_c: float = 2.0,
        solve: bool = True,
        name: str | None = None,
    ):
        self.search = Search(simulations, rollouts, uct_c, solve)
        self.name = self.name if name is None else name

    async def play(self, state: Any, seed: int) -> tuple[int, ...]:
        """A cell. Raises DataFault for a state in which no move is due."""
        root = await asyncio.to_thread(self.search.root, _read(state), seed)
        return (root.best_child().action,)


class MinimaxPlayer(Player):
    """Plays one of the optimal moves, each as likely."""

    name = "tictactoe_minimax"

    async def play(self, state: Any, seed: int) -> tuple[int, ...]:
        """A cell. Raises DataFault for a state in which no move is due."""
        return (random.Random(seed).choice(optimal(_read(state))),)
