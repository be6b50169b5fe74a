"""Agents of ten turns through the gateway: what the engine prefills over the ideal, and the time of their calls over that of the bare engine.

The same requests are then sent to an engine without anything between, one after the other as the agent did. Rounds alternate, and the ratio of times is
the median over rounds.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from actors.engines.local import LocalEngine
from actors.environments.agents.environment import Agent
from actors.environments.base import Task
from scheduler.config import UNJUDGED, SchedulerConfig
from scheduler.context import Context
from scheduler.journal import Journal
from scheduler.services import Shop
from scheduler.strategies import chain
from scheduler.text import Text
from scheduler.tree import Tree
from tools.defaults.models import DEFAULT
from tools.research.benches import slate_shape
from tools.research.benches.agent_talk import TURNS
from wire.messages import GenerateRequest, GenerateResult
from wire.numbers import Count


class Straight:
    """Calls the engine as a dispatcher does, and keeps what it asked."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.asked: list[GenerateRequest] = []

    async def call(self, service: str, request: GenerateRequest, **_: Any) -> GenerateResult:
        """Generate."""
        self.asked.append(request)
        return await self.engine.generate(request)


async def _talk(engine: LocalEngine, folder: Path, path: Path, number: int) -> tuple[float, list[GenerateRequest]]:
    """One agent. Returns the seconds between its first request and its end, and what the engine was asked."""
    straight, environment = Straight(engine), Agent("tools.research.benches.agent_talk:talk")
    journal = Journal(path / f"{number}.sqlite")
    settings = SchedulerConfig(judge=UNJUDGED, max_action_tokens=32)
    dispatcher: Any = straight
    text = Text(str(folder), environment.marks)
    shop = Shop(dispatcher, journal, text, environment, settings, Counter(), lambda tree, turns: None)
    tree, task = Tree(number, "t"), Task(f"t{number}", f"Tell me about the number {number}.")
    journal.start_tree(tree, number, 0)
    context = Context(shop, task, tree, random.Random(number))
    await context.plant()
    await context.tip()  # the process has started and asks
    began = time.perf_counter()
    try:
        await chain.grow(tree, context)
        return time.perf_counter() - began, straight.asked
    finally:
        await environment.close()
        journal.close()


async def _measure(model: str, rounds: int) -> dict[str, Any]:
    folder = slate_shape.model_folder(model)
    ratios, extra, prefilled, ideal = list[float](), list[float](), 0.0, 0.0
    with tempfile.TemporaryDirectory() as path:
        for number in range(rounds):
            engine = await slate_shape.engine(folder)
            seconds, asked = await _talk(engine, folder, Path(path), number)
            prefilled += engine.counts["prefilled_tokens"]
            ideal += engine.counts["ideal_prefill_tokens"]
            await engine.close()
            engine = await slate_shape.engine(folder)
            began = time.perf_counter()
            for request in asked:
                await engine.generate(request)
            bare = time.perf_counter() - began
            await engine.close()
            assert len(asked) == TURNS
            ratios.append(seconds / bare)
            extra.append(1000 * (seconds - bare) / TURNS)
    row = {"name": "time of an agent's calls / bare engine", "ratio": statistics.median(ratios), "goal": 1.1}
    return row | {
        "better": "lower",
        "ms_per_call": statistics.median(extra),
        "prefilled_tokens": prefilled,
        "ideal_prefill_tokens": ideal,
        "prefilled_over_ideal": prefilled / ideal,
    }


def run(model: str = DEFAULT, rounds: Count = 3) -> dict[str, Any]:
    """Return the ratio of times, the milliseconds of a call beside the engine, and the tokens prefilled over the ideal."""
    return asyncio.run(_measure(model, rounds))
