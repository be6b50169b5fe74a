"""Tic-Tac-Toe: the oracle that rewards moves, and the opponents (methods.md 3.2). Moves are cells
counted from 0. The search, OpenSpiel's UCT, holds Python's global lock (7 ms for 1,000 simulations
of 10 rollouts), so for more searches at once serve more processes."""

import asyncio
import random
from itertools import count
from typing import Annotated, Any, Literal

import msgspec
import pyspiel

from coppice.actors.environments.tictactoe import environment as game
from coppice.common.numbers import Count, NotNegative
from coppice.judges.base import Player, RuleJudge
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Judgement

_GAME = pyspiel.load_game("tic_tac_toe")
_MEMORY_MB = 64
"""More memory than a search needs: each simulation adds at most 9 nodes of about 100 bytes."""
_SLACK = 1e-9
"""Means that differ only by rounding count as equal."""
Simulations = Annotated[int, msgspec.Meta(ge=2)]
"""Simulations of a search, of which the first only opens the root."""


class Search(msgspec.Struct, frozen=True):
    """The options of UCT. rollouts: random games per leaf. uct_c: the weight of exploration. solve:
    back up proven results exactly."""

    simulations: int = 1000
    rollouts: int = 10
    uct_c: float = 2.0
    solve: bool = False

    def root(self, board: str, seed: int) -> Any:
        """Search from ``board``, a game in progress, and return the root. ``seed`` decides all
        randomness."""
        rng, state = random.Random(seed), _GAME.new_initial_state()
        # the marks may be set in any order: no part of an unfinished board has a line
        cells = {mark: [cell for cell, held in enumerate(board) if held == mark] for mark in "XO"}
        for ply in range(9 - board.count(".")):
            state.apply_action(cells["XO"[ply % 2]][ply // 2])
        evaluator = pyspiel.RandomRolloutEvaluator(self.rollouts, rng.getrandbits(31))
        limits, verbose = (self.simulations, _MEMORY_MB, self.solve), False
        bot = pyspiel.MCTSBot(_GAME, evaluator, self.uct_c, *limits, rng.getrandbits(31), verbose)
        return bot.mcts_search(state)

    def values(self, board: str, seed: int) -> dict[int, float]:
        """Return the mean backed-up return of each cell tried, in [-1, 1] for the side to move;
        with ``solve``, proven results replace means."""
        tried = [child for child in self.root(board, seed).children if child.explore_count]
        means = {child.action: child.total_reward / child.explore_count for child in tried}
        return means | {c.action: c.outcome[c.player] for c in tried if c.outcome}


def _read(state: Any) -> str:
    """Return the board of a state of plain values. Raises DataFault unless it is a game in
    progress."""
    try:
        board = msgspec.convert(state, game.TicTacToeState).board
    except msgspec.ValidationError as error:
        raise DataFault(f"state {state!r} is not one of tictactoe: {error}") from None
    whole = len(board) == 9 and set(board) <= set("XO.")
    fair = board.count("X") - board.count("O") in (0, 1)
    if not (whole and fair and game.legal_cells(board)):
        raise DataFault(
            f"board {board!r}: expected nine characters of 'XO.', X having begun, a game that is on"
        )
    return board


class TicTacToeOracle(RuleJudge):
    """Rewards a valid move: its value is within ``tolerance`` of the best value that the search
    finds (methods.md 3.2).

    Columns: reward (1 for a valid move, else 0); optimal, the same by exact minimax, for the log;
    valid_share, valid moves / legal moves. kind: "mcts", or "minimax" for exact values, which takes
    no other option. tolerance: a difference of returns in [-1, 1]; 0 is the paper's arg max.
    simulations, rollouts, uct_c: see ``Search``, which does not solve here, because it would stop
    before it has tried every best move. seed: of the first search; every search has a new seed, so
    that a position's error differs each time.
    """

    name = "tictactoe"
    environments = ("tictactoe",)
    columns = ("reward", "optimal", "valid_share")
    limits = (0.0, 1.0)
    concurrency = 1
    batch = 8
    threaded = True

    def __init__(
        self,
        *,
        kind: Literal["mcts", "minimax"] = "mcts",
        simulations: Simulations = 1000,
        rollouts: Count = 10,
        tolerance: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.1,
        uct_c: NotNegative = 2.0,
        seed: int = 0,
    ):
        self.search = Search(simulations, rollouts, uct_c)
        if kind == "minimax" and (self.search, tolerance, seed) != (Search(), 0.1, 0):
            raise ValueError(
                "kind = 'minimax' does not search: leave out simulations, rollouts, tolerance,"
                " uct_c and seed"
            )
        self.kind, self.tolerance, self._seeds = kind, tolerance, count(seed)

    def valid(self, board: str, seed: int) -> tuple[int, ...]:
        """Return the valid cells of a game in progress, in ascending order."""
        if self.kind == "minimax":
            return game.optimal(board)
        values = self.search.values(board, seed)
        least = max(values.values()) - self.tolerance - _SLACK
        return tuple(sorted(cell for cell, mean in values.items() if mean >= least))

    def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of one turn. Raises DataFault for a state that is not a game in
        progress."""
        board = _read(turn.state)
        valid = self.valid(board, next(self._seeds))
        cell = turn.move[0] if turn.move is not None and len(turn.move) == 1 else None
        scores = {
            "reward": float(cell in valid),
            "optimal": float(cell in game.optimal(board)),
            "valid_share": len(valid) / len(game.legal_cells(board)),
        }
        cells = " ".join(str(one + 1) for one in valid)
        why = f"{game.to_move(board)} to move on {board}, valid cells (1 to 9): {cells}"
        return Judgement(scores, explanation=why)


class MctsPlayer(Player):
    """Plays a proven win, otherwise the move that the search tried most. The defaults are the
    strong opponent of methods.md 3.2.

    name: the name of the service ``player.<name>``, so that one run can serve several strengths.
    Other options: see ``Search``.
    """

    name = "tictactoe_mcts"

    def __init__(
        self,
        *,
        simulations: Simulations = 1000,
        rollouts: Count = 10,
        uct_c: NotNegative = 2.0,
        solve: bool = True,
        name: str | None = None,
    ):
        self.search = Search(simulations, rollouts, uct_c, solve)
        self.name = self.name if name is None else name

    async def play(self, state: Any, seed: int) -> tuple[int, ...]:
        """Return a cell. Raises DataFault for a state that is not a game in progress."""
        root = await asyncio.to_thread(self.search.root, _read(state), seed)
        return (root.best_child().action,)


class MinimaxPlayer(Player):
    """Plays one of the optimal moves, all with equal probability."""

    name = "tictactoe_minimax"

    async def play(self, state: Any, seed: int) -> tuple[int, ...]:
        """Return a cell. Raises DataFault for a state that is not a game in progress."""
        return (random.Random(seed).choice(game.optimal(_read(state))),)
