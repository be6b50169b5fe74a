"""Oracle calls per second against the peer: the Tic-Tac-Toe judge as a worker batches it, over bare OpenSpiel searches of the same positions.

Simulations and rollouts are equal. The peer's states and bot are made beforehand, so the peer only searches. CPU seconds are measured,
because the machine is shared. Rounds alternate, and the ratio is their median. The row also has the calls per second of exact minimax, of
the Sudoku judge (9x9) and of the Minesweeper judge (5x5, 5 mines).
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pyspiel

from actors.environments.base import Action
from actors.environments.game import Game
from actors.environments.minesweeper import Minesweeper
from actors.environments.sudoku import Sudoku
from actors.environments.tictactoe import TicTacToe
from judges.base import Judge
from judges.oracles.minesweeper import MinesweeperOracle
from judges.oracles.sudoku import SudokuOracle
from judges.oracles.tictactoe import TicTacToeOracle
from judges.serve import Batcher
from tools.defaults.legal_play import random_play
from wire.messages import JudgedTurn, JudgeRequest

POSITIONS, ROUNDS, SIMULATIONS, ROLLOUTS = 96, 5, 1000, 10
LABELS = 2000
"""The number of calls of each oracle that does not search."""
UCT_C, MEMORY_MB = 2.0, 64
GOAL = 0.85


def turns_of(game: Game, count: int) -> list[JudgedTurn]:
    """Return positions of random play, each with the move made there."""
    return [
        game.judged(turn.task, turn.state, Action("move", "", move=turn.move), 1, 100)
        for turn in random_play(game, count, seed=0)
    ]


async def _served(judge: Judge, turns: Sequence[JudgedTurn]) -> None:
    """Send every turn in a request of its own, all at once, as chains do."""
    batcher = Batcher(judge)
    requests = (batcher.handle(JudgeRequest([turn]), None) for turn in turns)  # pyright: ignore[reportArgumentType]
    await asyncio.gather(*requests)


def rate(judge: Judge, turns: Sequence[JudgedTurn]) -> float:
    """Return the calls per CPU second."""
    start = time.process_time()
    asyncio.run(_served(judge, turns))
    return len(turns) / (time.process_time() - start)


class Bare:
    """OpenSpiel's searches alone, on states that the constructor makes."""

    def __init__(self, turns: Sequence[JudgedTurn], simulations: int, rollouts: int):
        game = pyspiel.load_game("tic_tac_toe")
        evaluator = pyspiel.RandomRolloutEvaluator(rollouts, 0)
        self.bot = pyspiel.MCTSBot(game, evaluator, UCT_C, simulations, MEMORY_MB, False, 0, False)
        self.states = [self._state(game.new_initial_state(), turn.state["board"]) for turn in turns]

    @staticmethod
    def _state(state: Any, board: str) -> Any:
        cells = {mark: [cell for cell, held in enumerate(board) if held == mark] for mark in "XO"}
        for ply in range(9 - board.count(".")):
            state.apply_action(cells["XO"[ply % 2]][ply // 2])
        return state

    def rate(self) -> float:
        """Return the searches per CPU second."""
        start = time.process_time()
        for state in self.states:
            self.bot.mcts_search(state)
        return len(self.states) / (time.process_time() - start)


def run(positions: int = POSITIONS, rounds: int = ROUNDS, labels: int = LABELS) -> dict[str, Any]:
    """Return the ratio and the rates, which are medians over rounds."""
    turns = turns_of(TicTacToe(opponents={"random": 1.0}), max(positions, labels))
    searched = turns[:positions]
    bare = Bare(searched, SIMULATIONS, ROLLOUTS)
    judges = {
        "mcts": (TicTacToeOracle(simulations=SIMULATIONS, rollouts=ROLLOUTS), searched),
        "minimax": (TicTacToeOracle(kind="minimax"), turns[:labels]),
        "sudoku": (SudokuOracle(), turns_of(Sudoku(), labels)),
        "minesweeper": (MinesweeperOracle(), turns_of(Minesweeper(), labels)),
    }
    rates: dict[str, list[float]] = {"bare": [], **{name: [] for name in judges}}
    for number in range(rounds + 1):
        rate_of = {"bare": bare.rate()} | {name: rate(judge, its) for name, (judge, its) in judges.items()}
        for name, value in rate_of.items() if number else ():  # the first round fills minimax's cache
            rates[name].append(value)
    ratio = statistics.median(a / b for a, b in zip(rates["mcts"], rates["bare"], strict=True))
    row = {"name": "oracle calls/s, tic-tac-toe judge / bare OpenSpiel MCTS", "ratio": ratio, "goal": GOAL}
    row |= {"better": "higher", "simulations": SIMULATIONS, "rollouts": ROLLOUTS}
    return row | {f"{name}_calls_per_cpu_s": statistics.median(values) for name, values in rates.items()}
