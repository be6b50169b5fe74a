"""Whole games on a real embedded engine, for the benchmarks of games: services in this process and a tiny policy with random weights.

Such a policy writes no legal move, so the game here reads any text as a legal move. Everything else works as in a run.
"""

import random
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from actors.environments.base import Action
from actors.environments.tictactoe import TicTacToe
from judges.base import Judge
from scheduler import strategies
from scheduler.config import SchedulerConfig
from scheduler.context import Context
from scheduler.journal import Journal
from scheduler.services import Shop
from scheduler.text import Text
from scheduler.together import together
from scheduler.tree import Tree
from tools.defaults.tiny_board import make_tiny_policy
from tools.evaluating.in_process import InProcess
from wire.messages import GenerateRequest, GenerateResult

ACTION_TOKENS = 3
"""Tokens of a move: two tags and a digit."""
WHOLE, COMPACT = "tictactoe", "tictactoe_compact"
"""Names of prompts: one with all rules (about 1,000 tokens of the tiny policy), one with the bare position (about 25 tokens)."""
LONGEST = 1024
"""The most tokens of a prompt and its move."""


class AnyText(TicTacToe):
    """Tic-Tac-Toe against random play in which every text is a legal move, chosen by the checksum of the text."""

    def __init__(self, prompt: str):
        super().__init__(prompt=prompt, opponents={"random": 1.0})

    def read(self, state: Any, text: str) -> Action:
        """Return a valid action for any text."""
        moves = self.moves(state)
        return Action("move", text, move=moves[zlib.crc32(text.encode()) % len(moves)])


class Services(InProcess):
    """The engine and judges, with a record of the engine's requests and of the time of its last answer.

    split: every sample gets a request of its own. prompts: the number of requests of each prompt.
    """

    def __init__(self, engine: LocalEngine, judges: Sequence[Judge], split: bool = False):
        super().__init__(engine, judges)
        self.split, self.local = split, engine
        self.prompts: Counter[bytes] = Counter()
        self.unshared_tokens = 0
        self.start_s = self.answered_s = time.monotonic()
        self.handlers["generate"] = self._generate

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        self.unshared_tokens += request.n * len(request.tokens)
        if not self.split:
            return await self._ask(request)
        ones = [
            GenerateRequest(request.tokens, 1, msgspec.structs.replace(request.sampling, seed=seed))
            for seed in random.Random(request.sampling.seed).sample(range(2**62), request.n)
        ]
        results = await together(self._ask(one) for one in ones)
        samples = [sample for result in results for sample in result.samples]
        return GenerateResult(samples, len(request.tokens), results[0].cached_tokens)

    async def _ask(self, request: GenerateRequest) -> GenerateResult:
        self.prompts[request.tokens.tobytes()] += 1
        result = await self.local.generate(request)
        self.answered_s = time.monotonic()
        return result


@asynccontextmanager
async def opened(services: Services) -> AsyncIterator[Services]:
    """Start the services, yield them, and close them at the end."""
    await services.start()
    try:
        yield services
    finally:
        await services.close()


def engine(folder: Path, max_batch: int) -> LocalEngine:
    """Return a float32 engine on one thread for the policy of ``policy``, with room for every prefix. It must be started before use."""
    config = ActorsConfig(dtype="float32", max_batch=max_batch, kv_cache_gib=2.0, max_context=LONGEST)
    return LocalEngine(str(folder), config)


def policy(folder: Path) -> Path:
    """Make a tiny policy in a new folder below ``folder`` and return that folder."""
    return make_tiny_policy(folder / "policy", hidden=64, layers=2, heads=4, intermediate=128)


async def play(
    services: Services,
    model: Path,
    folder: Path,
    games: int,
    settings: SchedulerConfig,
    kind: type[Context] = Context,
    prompt: str = COMPACT,
) -> Counter[str]:
    """Grow ``games`` trees concurrently by ``settings.strategy``, with a journal in ``folder``. Return the counts of the contexts."""
    environment, counts = AnyText(prompt), Counter[str]()
    journal = Journal(folder / f"{time.monotonic_ns()}.sqlite")
    shop = Shop(
        services,  # pyright: ignore[reportArgumentType] (it is called as the dispatcher is)
        journal,
        Text(str(model)),
        environment,
        settings,
        counts,
        lambda tree, turns: None,
        services.local.config.max_batch,
    )

    async def grow(number: int) -> None:
        tree = Tree(number, "")
        context = kind(shop, environment.task(number), tree, random.Random(number))
        await context.plant()
        await strategies.load(settings.strategy, settings.strategy_options)(tree, context)

    services.start_s = time.monotonic()
    try:
        await together(grow(number) for number in range(games))
    finally:
        journal.close()
    return counts
