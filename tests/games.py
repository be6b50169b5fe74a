"""A game for whole runs with an untrained policy, named "tests.games:AnyText" in data.environment,
and what tests of environments share."""

import asyncio
import zlib
from typing import Any

from coppice.actors.environments.base import Action, Transition
from coppice.actors.environments.tictactoe.environment import TicTacToe, TicTacToeState


class AnyText(TicTacToe):
    """Tic-Tac-Toe in which every text is a legal move, the one its checksum picks: an untrained
    policy writes no real one."""

    def read(self, state: TicTacToeState, text: str) -> Action:
        """Always valid."""
        moves = self.moves(state)
        return Action("move", text, move=moves[zlib.crc32(text.encode()) % len(moves)])


def play(environment: Any, state: Any, *actions: str, tools: Any = None) -> list[Transition]:
    """The transitions of actions, or of whole replies, which begin with "<"."""
    transitions: list[Transition] = []
    for action in actions:
        reply = action if action.startswith("<") else f"<think>x</think><action>{action}</action>"
        step = environment.step(state, environment.read(state, reply), tools)
        transitions.append(asyncio.run(step))
        state = transitions[-1].state
    return transitions
