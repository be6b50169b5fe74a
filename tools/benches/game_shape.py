"""Whole games on a real embedded engine, shared by the benchmarks of games: services in this process, a tiny policy of random weights.

Such a policy writes nothing legal, so the environments here read any text as a legal move; everything else is what a run does.
"""

import asyncio
import random
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from actors.environments.base import Action
from actors.environments.game import Game
from actors.environments.tictactoe import TicTacToe
from judges.base import Judge
from scheduler import strategies
from scheduler.config import SchedulerConfig
from scheduler.context import Context, Shop
from scheduler.journal import Journal
from scheduler.text import Text
from scheduler.together import together
from scheduler.tree import Tree
from tools.in_process import InProcess
from tools.tiny_policy import make_tiny_policy

ACTION_TOKENS = 3
"""Two tags and a digit."""


class AnyText(Game):
    """A game in which every text is a legal move: the one that its checksum picks."""

    def read(self, state: Any, text: str) -> Action:
        moves = self.moves(state)
        return Action("move", text, move=moves[zlib.crc32(text.encode()) % len(moves)])


class AnyTicTacToe(AnyText, TicTacToe):
    """Tic-Tac-Toe of any text, against random play."""

    def __init__(self, prompt: str = "tictactoe_compact"):
        super().__init__(prompt=prompt, opponents={"random": 1.0})


class Played(Counter[str]):
    """What a batch of games cost: the engine's counters, seconds, and ``requests``."""


class Requests(InProcess):
    """The services, with a record of the prompts that were asked for. split: every sample is a request of its own."""

    def __init__(self, engine: LocalEngine, judges: Sequence[Judge], split: bool = False):
        super().__init__(engine, judges)
        self.split = split
        self.asked: Counter[bytes] = Counter()
        self.unshared_tokens = 0
