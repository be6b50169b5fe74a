"""SLATE trees that the real scheduler grows on several real actors in one process: dispatcher, sockets, strategy and engines.

The policy is tiny and has random weights, so the environment reads any text as an action and answers with made-up text. Each character
is one token, so all lengths are known.
"""

import asyncio
import random
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from actors.environments.base import Task
from actors.worker import service
from scheduler.config import SchedulerConfig
from scheduler.context import Context
from scheduler.dispatch import DispatchConfig, Dispatcher
from scheduler.fleet import CAPACITY, Fleet
from scheduler.journal import Journal
from scheduler.residency import Forecast
from scheduler.services import Shop
from scheduler.strategies import slate
from scheduler.text import Text
from scheduler.together import together
from scheduler.tree import Tree
from tools.defaults.tiny_board import make_tiny_policy
from tools.research.benches.any_text import AnyText, Shape
from wire.messages import Judgement, JudgeRequest, JudgeResult
from wire.service import Call, Handler, Service

HEAD, QUESTION, OBSERVATION, ACTION = 120, 30, 60, 16
"""Lengths in tokens: the text that begins all prompts, the text that a question adds, an observation, the longest action."""
STEPS, CANDIDATES = 4, 5
HIDDEN, LAYERS, HEADS = 32, 2, 4
TOKEN_BYTES = 2 * 4 * HIDDEN * LAYERS + 4
"""Bytes of the keys and values of one token in float32, and of its id."""
AT_ONCE = 4
"""The number of requests whose samples an engine decodes together."""
BATCH = AT_ONCE * CANDIDATES
"""Samples that an actor decodes together."""
RUNNING = AT_ONCE * (512 + CANDIDATES * ACTION)
"""Tokens that an engine holds for these requests beside its prefix cache: 512 per prompt and ACTION per sample."""
JUDGE = "bench"
BEAT_S = 0.05
"""Seconds between heartbeats, which are frequent so that the engines' gauges are fresh."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _environment() -> AnyText:
    """Return the environment. Its questions are one character shorter, because the template adds a newline."""
    return AnyText(Shape(STEPS, HEAD, QUESTION - 1, OBSERVATION), _LETTERS)


def _judging(median_s: float) -> Handler:
    """Return a handler that rewards by checksum after a log-normal wait (sigma 1) with the median ``median_s``."""
    rng = random.Random(0)

    async def judge(request: JudgeRequest, call: Call) -> JudgeResult:
        if median_s:
            await asyncio.sleep(median_s * rng.lognormvariate(0.0, 1.0))
        return _judge(request)

    return judge


def _judge(request: JudgeRequest) -> JudgeResult:
    rewards = [zlib.crc32(turn.response.encode()) % 1000 / 1000 for turn in request.turns]
    return JudgeResult([Judgement({"reward": reward}) for reward in rewards])


class Setting(msgspec.Struct, frozen=True):
    """One measurement. questions: the number of trees. tokens: how many tokens all prefix caches hold together, beside running samples
    (None: more than enough). judge_s: the median latency of the judge in seconds."""

    questions: int
    actors: int = 2
    tokens: float | None = None
    judge_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """The result of one run. Tokens over all actors: prompt (of all requests), prefilled, ideal (each distinct prompt token computed once),
    held (distinct tokens of all trees that a cache could hold). forecast: the scheduler's prediction. requests: counts by actor. seconds:
    wall time."""

    prompt: int
    prefilled: int
    ideal: int
    held: int
    forecast: Forecast
    requests: dict[str, int]
    seconds: float

    @property
    def ratio(self) -> float:
        return self.prefilled / self.ideal


def distinct(prompts: Sequence[np.ndarray]) -> int:
    """Count the tokens of the prompts, each common prefix once."""
    return len({tokens[:end].tobytes() for tokens in prompts for end in range(1, len(tokens) + 1)})


def ideal(trees: Sequence[Tree]) -> int:
    """Count the prompt tokens that one unbounded cache computes: the first prompts, then the observations, each with the last token of
    the action before it, which was sampled but never computed."""
    later = [node for tree in trees for node in tree.nodes.values() if node.kind == "observation"]
    return distinct([tree.nodes[0].tokens for tree in trees]) + sum(1 + len(node.tokens) for node in later)


def held(trees: Sequence[Tree]) -> int:
    """Count the distinct tokens that the trees bring into a cache: all but the last token of each action that nothing follows."""
    paths = [tree.prefix(node) for tree in trees for node in tree.nodes.values()]
    return distinct([path[:-1] for path in paths])


def policy(folder: Path) -> Path:
    """Make the tiny policy and return its folder."""
    return make_tiny_policy(folder / "policy", hidden=HIDDEN, layers=LAYERS, heads=HEADS, intermediate=2 * HIDDEN)


def engines(model: Path, setting: Setting) -> list[LocalEngine]:
    """Return engines with room for every request. They must be started before use."""
    tokens = 2**19 if setting.tokens is None else setting.tokens / setting.actors
    gib = (tokens + RUNNING) * TOKEN_BYTES / 2**30
    config = ActorsConfig(
        dtype="float32", max_batch=BATCH, capacity=setting.questions, kv_cache_gib=gib, max_context=512
    )
    return [LocalEngine(str(model), config, seed) for seed in range(setting.actors)]


class Actor(Service):
    """The service of an engine, which also reports how many tokens running samples leave to the prefix cache."""

    def __init__(self, engine: LocalEngine, name: str):
        base = service(engine, name, engine.config.capacity)
        super().__init__(name, base.handlers, base.capacity, self._stats)
        self.engine = engine

    def _stats(self) -> dict[str, float]:
        stats = self.engine.stats()
        running = stats.get("kv_running_bytes", 0.0)
        return {**stats, CAPACITY: (self.engine.config.kv_cache_gib * 2**30 - running) // TOKEN_BYTES}


@asynccontextmanager
async def opened(folder: Path, actors: Sequence[Actor], judge_s: float) -> AsyncIterator[Dispatcher]:
    """Start a dispatcher, the actors and a judge; yield the dispatcher once it knows the actors' capacities; close everything."""
    dispatcher = Dispatcher(f"ipc://{folder}/scheduler", None, DispatchConfig(heartbeat_s=BEAT_S))
    services = [*actors, Service("judge", {f"judge.{JUDGE}": _judging(judge_s)}, 64)]
    await dispatcher.start()
    for actor in actors:
        await actor.engine.start()
    tasks = [asyncio.create_task(one.run(dispatcher.endpoint, None, signals=False)) for one in services]
    try:
        await dispatcher.wait_for("generate", len(actors), 60)
        async with asyncio.timeout(60):
            while not all(CAPACITY in worker.stats for worker in dispatcher.workers("generate")):
                await asyncio.sleep(0.01)
        yield dispatcher
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await dispatcher.close()
        for actor in actors:
            await actor.engine.close()


async def grow(dispatcher: Dispatcher, model: Path, folder: Path, fleet: Fleet, questions: int) -> list[Tree]:
    """Grow ``questions`` trees concurrently."""
    settings = SchedulerConfig(budget=STEPS, judge=JUDGE, max_action_tokens=ACTION)
    journal = Journal(folder / "journal.sqlite")
    emit: Callable[..., None] = lambda tree, turns: None  # noqa: E731
    shop = Shop(dispatcher, journal, Text(str(model)), _environment(), settings, Counter(), emit, fleet=fleet)

    async def one(number: int) -> Tree:
        tree = Tree(number, str(number))
        context = Context(shop, Task(str(number), seed=number), tree, random.Random(number))
        await context.plant()
        await slate.grow(tree, context, CANDIDATES)
        fleet.ended(tree.id)
        dispatcher.look_again("generate")
        return tree

    try:
        return await together(one(number) for number in range(questions))
    finally:
        journal.close()


async def _measure(model: Path, fleet: Fleet, setting: Setting) -> Outcome:
    started = engines(model, setting)
    actors = [Actor(engine, f"actor-{i}") for i, engine in enumerate(started)]
    served: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        async with opened(Path(scratch), actors, setting.judge_s) as dispatcher:
            dispatcher.on_event = lambda event: served.update([event.worker] * (event.service == "generate"))
            start = time.monotonic()
            trees = await grow(dispatcher, model, Path(scratch), fleet, setting.questions)
            spent = time.monotonic() - start
    prompt, prefilled = (
        sum(int(engine.stats().get(name, 0)) for engine in started) for name in ("prompt_tokens", "prefilled_tokens")
    )
    forecast, requests = fleet.residency.take(), dict(sorted(served.items()))
    return Outcome(prompt, prefilled, ideal(trees), held(trees), forecast, requests, spent)


def measure(model: Path, fleet: Fleet, setting: Setting) -> Outcome:
    """Grow the trees of ``setting`` with the placement of ``fleet``."""
    return asyncio.run(_measure(model, fleet, setting))
