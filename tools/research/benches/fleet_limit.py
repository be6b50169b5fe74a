"""One scheduler under a simulated fleet of 1,000 actors and 10,000 judge workers: trees an hour, the event loop's lag, memory, and where it ends.

Dispatcher, placement, strategy, tokenizer and journal are the real ones. The workers are a transport in this process that answers each call after a
log-normal time, and sends every worker's heartbeats. More and more trees grow at once, in real time; the processor time that is spent is compared
with the time that has passed. What is sampled and found is a long text that is always the same, or what a recorded run has sampled and found, drawn at
random: then lengths and numbers of turns are spread as they were there.
"""

import asyncio
import gc
import itertools
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from actors.environments.search_qa import SearchQA
from scheduler.config import SchedulerConfig
from scheduler.dispatch import DispatchConfig, Dispatcher
from scheduler.fleet import CAPACITY
from scheduler.journal import Journal
from scheduler.services import Shop
from scheduler.survivors import sparing
from scheduler.text import Text
from tools.inspecting.figures import panels, save
from tools.inspecting.runs import Curve
from tools.research.benches import tree_cost
from tools.research.benches.call_cost import Answering
from tools.research.benches.load import ACTION, TICK_S
from tools.research.benches.slate_shape import model_folder
from wire import loop
from wire.arrays import Frame, decode_body, decode_header, encode
from wire.messages import (
    GenerateRequest,
    GenerateResult,
    Heartbeat,
    Judgement,
    JudgeRequest,
    JudgeResult,
    Passage,
    Register,
    Request,
    Result,
    RetrieveResult,
    Sample,
)
from wire.numbers import Count, Positive

OUTCOME = f"judge.{SearchQA.outcome_judge}"
SECONDS = {"generate": (4.0, 0.5), "judge.any": (1.0, 1.3), "retrieve": (0.05, 0.5), OUTCOME: (0.05, 0.5)}
"""Median and sigma of the log-normal time of an answer."""
CAPACITIES = {"generate": 8, "judge.any": 4, "retrieve": 64, OUTCOME: 64}
BEGIN_S = 20.0
"""Trees that are added begin within so many seconds."""
DRAWN = {
    "trees_per_hour": "trees an hour", "cpu_share": "share of a core",
    "lag_p99_ms": "lag of the loop, p99, ms", "cpu_ms_per_tree": "processor time of a tree, ms",
}  # fmt: skip
FEW = 8
"""Retrievers, and judges of the outcome."""


class Texts:
    """What workers answer: samples, and passages that are found together; a recorded run's, or always the same ones where ``run`` is ""."""

    def __init__(self, text: Text, run: str):
        actions, self.found = [ACTION], [[tree_cost.PASSAGE] * 3]
        if run:
            journal = Journal(Path(run) / "journal.sqlite", readonly=True)
            nodes = [node for row in journal.trees("status = 'closed'") for node in journal.tree(row).nodes.values()]
            journal.close()
            actions = [node.text for node in nodes if node.kind == "action"]
            self.found = [[Passage("1", "", node.text, 1.0)] for node in nodes if node.kind == "observation"]
        if not actions or not self.found:
            raise ValueError(f"run = {run!r}: expected a run with closed trees that searched; its journal has none")
        self.samples = [self._sample(text.encode(action)) for action in actions]

    def _sample(self, tokens: np.ndarray) -> Sample:
        return Sample(tokens, np.full(len(tokens), -1, np.float32), np.zeros(len(tokens), np.int32), "stop")


class Workers(Answering):
    """Answers each call when its time has come. beats: the heartbeats of all workers, one after the other."""

    def __init__(self, texts: Texts, heartbeat_s: float):
        super().__init__()
        self.texts, self.heartbeat_s, self.rng = texts, heartbeat_s, random.Random(0)
        self.identities: list[bytes] = []

    def join(self, service: str, count: int) -> None:
        """Register ``count`` workers."""
        for number in range(count):
            identity = f"{service}-{number}".encode()
            self.identities.append(identity)
            self.say(identity, Register(identity.decode(), [service], CAPACITIES[service], 1, "here"))
            self.say(identity, Heartbeat(0, {CAPACITY: 2e5}))

    async def beat(self) -> None:
        """Send each worker's heartbeat once in ``heartbeat_s``, a hundredth of them at a time."""
        for first in itertools.cycle(range(100)):
            await asyncio.sleep(self.heartbeat_s / 100)
            for identity in self.identities[first::100]:
                self.say(identity, Heartbeat(0, {CAPACITY: 2e5}))

    def send(self, frames: Iterable[Frame]) -> None:
        """Answer a request when its time has come."""
        identity, *parts = frames
        header = decode_header(parts)
        if isinstance(header, Request):
            median, sigma = SECONDS[header.service]
            seconds = median * math.exp(sigma * self.rng.gauss(0, 1))
            asyncio.get_running_loop().call_later(seconds, self._answered, identity, header, parts)

    def _answered(self, identity: Frame, header: Request, parts: list[Frame]) -> None:
        self._deliver([identity, *encode(Result(header.id), self._result(header.service, parts))])

    def _result(self, service: str, parts: list[Frame]) -> msgspec.Struct:
        if service == "generate":
            request = decode_body(parts, GenerateRequest)
            return GenerateResult(self.rng.choices(self.texts.samples, k=request.n), len(request.tokens), 0)
        if service == "retrieve":
            return RetrieveResult([self.rng.choice(self.texts.found)])
        turns = decode_body(parts, JudgeRequest).turns
        scores = {"outcome": 0.0, "f1": 0.0} if service == OUTCOME else {"think": 1.0, "query": 0.0, "answer": 0.0}
        return JudgeResult([Judgement(scores) for _ in turns])


class Fleet:
    """A scheduler with its workers. grown, nodes: trees that have ended, and their nodes. lags: the delays of a timer, in seconds. Use as an async context."""

    def __init__(self, folder: Path, text: Text, actors: int, judges: int, heartbeat_s: float, run: str = ""):
        self.workers = Workers(Texts(text, run), heartbeat_s)
        self.dispatcher = Dispatcher("", None, DispatchConfig(heartbeat_s, dead_after_s=600.0), router=self.workers)
        self.journal, groups = Journal(folder / "journal.sqlite"), itertools.count()
        self.shop = Shop(
            self.dispatcher, self.journal, text, SearchQA(), SchedulerConfig(judge="any", budget=4), Counter(),
            lambda tree, turns: self.journal.save_group(tree, next(groups), turns),
        )  # fmt: skip
        self.counts = {"generate": actors, "judge.any": judges, "retrieve": FEW, OUTCOME: FEW}
        self.grown, self.nodes, self.lags, self._numbers = 0, 0, list[float](), itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> "Fleet":
        await self.dispatcher.start()
        for service, count in self.counts.items():
            self.workers.join(service, count)
            await self.dispatcher.wait_for(service, count, 60.0)
        self._tasks += [asyncio.create_task(work) for work in (self.workers.beat(), self._watch())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.dispatcher.close()
        self.journal.close()

    def more(self, trees: int) -> None:
        """Grow so many trees more at once; where one ends another one begins."""
        self._tasks += [asyncio.create_task(self._grow()) for _ in range(trees)]

    async def _grow(self) -> None:
        await asyncio.sleep(BEGIN_S * random.random())
        while True:
            nodes = await tree_cost.grow(self.shop, next(self._numbers))
            self.nodes += nodes  # not in one statement, which would read the sum before the wait
            self.grown += 1

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags.append(time.perf_counter() - due)


def _curve(found: dict[int, dict[str, float]], key: str) -> Curve:
    trees = sorted(found)[1:]  # the first one is none, with heartbeats only
    return Curve([float(many) for many in trees], [found[many][key] for many in trees], [math.nan] * len(trees))


async def _measure(fleet: Fleet, seconds: float) -> dict[str, float]:
    grown, nodes, began, spent = fleet.grown, fleet.nodes, time.monotonic(), time.process_time()
    fleet.lags.clear()
    await asyncio.sleep(seconds)
    passed, spent = time.monotonic() - began, time.process_time() - spent
    grown, nodes, lags = fleet.grown - grown, fleet.nodes - nodes, sorted(fleet.lags)
    return {
        "trees_per_hour": 3600 * grown / passed,
        "nodes_per_tree": nodes / max(1, grown),
        "cpu_share": spent / passed,
        "cpu_ms_per_tree": 1000 * spent / max(1, grown),
        "lag_p50_ms": 1000 * lags[len(lags) // 2],
        "lag_p99_ms": 1000 * lags[int(0.99 * (len(lags) - 1))],
        "open_calls": sum(fleet.dispatcher.waiting().values()),
    }


async def _all(
    actors: int, judges: int, trees: list[int], seconds: float, heartbeat_s: float, run: str
) -> dict[int, dict[str, float]]:
    process, text, found = psutil.Process(), Text(str(model_folder())), dict[int, Any]()
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(Path(folder), text, actors, judges, heartbeat_s, run) as fleet:
            found[0] = await _measure(fleet, seconds / 4)
            gc.collect()
            empty, now = process.memory_info().rss, 0
            for many in trees:
                fleet.more(many - now)
                now = many
                await asyncio.sleep(seconds)
                found[many] = await _measure(fleet, seconds)
                found[many]["kib_per_tree"] = (process.memory_info().rss - empty) / 1024 / many
    return found


def run(
    actors: Count = 1000,
    judges: Count = 10_000,
    most: Count = 8000,
    seconds: Positive = 30.0,
    heartbeat_s: Positive = 2.0,
    texts: str = "",
    figure: str = "",
) -> dict[str, Any]:
    """Return the trees an hour with ``most`` trees at once over what the processor time of a tree with a sixteenth of them promises, and
    everything measured with a sixteenth, an eighth, a quarter, a half and all of them (0: none, only heartbeats). texts: the run folder whose texts
    are sampled and found. figure: the SVG or PNG file that gets the curves."""
    trees = [max(1, most // share) for share in (16, 8, 4, 2, 1)]
    with sparing():
        found = loop.run(_all(actors, judges, trees, seconds, heartbeat_s, texts))
    idle, few = found[0]["cpu_share"], found[trees[0]]
    if not few["trees_per_hour"]:
        raise RuntimeError(f"no tree has ended within {seconds} s: expected more of them; set seconds higher")
    per_tree = (few["cpu_share"] - idle) / few["trees_per_hour"]
    if figure:
        save(
            panels({title: {"one scheduler": _curve(found, key)} for key, title in DRAWN.items()}, "trees at once"),
            Path(figure),
        )
    row = {"name": "trees an hour, most / promised by a tree's cost", "goal": 0.8, "better": "higher"}
    row |= {
        "ratio": max(f["trees_per_hour"] for f in found.values()) / ((1 - idle) / per_tree),
        "promised": (1 - idle) / per_tree,
    }
    return row | {f"{many} trees at once: {key}": value for many, one in found.items() for key, value in one.items()}
