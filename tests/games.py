"""A game for whole runs with an untrained policy, named "tests.games:AnyText" in data.environment."""

import zlib

from coppice.actors.environments.base import Action
from coppice.actors.environments.tictactoe.environment import TicTacToe, TicTacToeState


class AnyText(TicTacToe):
    """Tic-Tac-Toe in which every text is a legal move, the one its checksum picks: an untrained
    policy writes no real one."""

    def read(self, state: TicTacToeState, text: str) -> Action:
        """Always valid."""
        moves = self.moves(state)
        return Action("move", text, move=moves[zlib.crc32(text.encode()) % len(moves)])
