"""Prefill over the ideal, hit rate and balance of a fleet of simulated servers that get the generate calls of a recorded run.

``tools/bench recorded_fleet --json --set run=RUN`` replays the journal of RUN; without one, trees that the real scheduler grows here on a tiny
engine. A call becomes possible when the one above it in its tree is done; new trees begin as trees end. No server computes anything: each is a
prefix cache (``scheduler.residency``), one prefill at a time, and a decoding time, so that the counts are the same each time. As in an engine, what is being
computed takes room in the cache, and calls that find none wait there, first in, first out.

Calls of one actor a server (ours, arrival, round robin) go out whole. Behind a router the engine sends a call as it does to SGLang's: its prefix, and
when that is computed each sample as a request of its own.
"""

import asyncio
import heapq
import itertools
import math
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scheduler.calls import Worker
from scheduler.fleet import CAPACITY, Fleet
from scheduler.journal import Journal
from scheduler.placement import Place
from scheduler.pool import Pool
from scheduler.residency import Prefixes
from scheduler.tree import Tree
from tools.research.benches import fleet_shape
from tools.research.benches.routers import Arrival, RoundRobin, Router
from wire.messages import GenerateRequest, GenerateResult, Register, Sample, Sampling

PREFILL_S, DECODE_S, JUDGE_S, LOOK_S = 1 / 8000, 0.02, 0.1, 0.05
"""Simulated seconds of a prompt token, of a step of decoding, between an answer and the next call (the median; log-normal, sigma 1), and until held-back calls are tried again."""
CAPACITY_CALLS = 16
"""Calls that a server takes at once; more wait at the scheduler. A router holds nothing back."""
BATCH = 64
"""Samples that a server decodes together."""
TREES, WAVES = 8, 3
"""Trees at once for each server, and how many come one after the other."""
GOAL = 1.1
WAYS: dict[str, tuple[Callable[[], Fleet], bool]] = {
    "ours": (lambda: Fleet(batch=BATCH), False),
    "arrival, least loaded": (Arrival, False),
    "round robin": (RoundRobin, False),
    "router, round robin": (RoundRobin, True),
    "router, cache-aware": (Router, True),
    "router, cache-aware, threshold 0.8": (lambda: Router(threshold=0.8), True),
}
"""By name: the placement, and whether it is a router's, which sees single sequences."""


class Call(msgspec.Struct):
    """A recorded call: its prefix, its samples, the version that sampled them, and the calls that it made possible."""

    prefix: np.ndarray
    samples: list[np.ndarray]
    version: int
    below: list["Call"]


def calls(tree: Tree) -> list[Call]:
    """Return the calls of a tree that were possible at its beginning."""
    first, made = list[Call](), dict[int, Call]()
    for node in tree.nodes.values():
        actions = [n for n in tree.children(node) if n.kind == "action" and n.versions is not None and len(n.tokens)]
        if not actions:
            continue
        call = Call(tree.prefix(node), [n.tokens for n in actions], int(max(n.versions[0] for n in actions)), [])  # pyright: ignore[reportOptionalSubscript]
        made[node.id] = call
        above = next((made[n.id] for n in reversed(tree.path(node)[:-1]) if n.id in made), None)
        (first if above is None else above.below).append(call)
    return first


def recorded(run: str) -> list[list[Call]]:
    """Return the calls of the training trees of a run, in the order in which they were drawn."""
    journal = Journal(Path(run) / "journal.sqlite", readonly=True)
    try:
        return [first for row in journal.trees("split='train'") if (first := calls(journal.tree(row)))]
    finally:
        journal.close()


def grown() -> list[list[Call]]:
    """Return the calls of SLATE trees that the real scheduler grows on a tiny engine."""

    async def grow(folder: Path) -> list[Tree]:
        model, setting = fleet_shape.policy(folder), fleet_shape.Setting(32, actors=1)
        actors = [fleet_shape.Actor(engine, "actor") for engine in fleet_shape.engines(model, setting)]
        async with fleet_shape.opened(folder, actors, 0.0) as dispatcher:
            return await fleet_shape.grow(dispatcher, model, folder, Fleet(), setting.questions)

    with tempfile.TemporaryDirectory() as scratch:
        return [calls(tree) for tree in asyncio.run(grow(Path(scratch)))]


def need(tree: list[Call]) -> int:
    """Return the distinct tokens that a tree brings into a cache."""
    held, left = Prefixes(), list(tree)
    while left:
        call = left.pop()
        left += call.below
        for sample in call.samples:
            held.insert(call.prefix.tobytes() + sample[:-1].tobytes())
    return held.tokens


def copies(trees: Sequence[list[Call]], count: int) -> list[list[Call]]:
    """Return ``count`` trees: those recorded, each followed by copies of it that share only the head of all prompts with it."""
    firsts = [first[0].prefix for first in trees]
    shortest = min(map(len, firsts))
    same = np.all([prefix[:shortest] == firsts[0][:shortest] for prefix in firsts], axis=0)
    head = int(np.argmin(same)) if not same.all() else shortest

    def moved(call: Call, by: int) -> Call:
        prefix = call.prefix.copy()
        prefix[head:] += by
        return Call(prefix, [s + np.int32(by) for s in call.samples], call.version, [moved(c, by) for c in call.below])

    each = -(-count // len(trees))
    return [[moved(call, at % each * 2**20) for call in trees[at // each]] for at in range(count)]


class Asked:
    """One request: the whole call, its prefix alone (``samples`` empty), or one of its samples."""

    def __init__(self, tree: int, call: Call, samples: list[np.ndarray], place: Place, then: Callable[[], None]):
        self.tree, self.call, self.samples, self.place, self.then = tree, call, samples, place, then
        self.tokens = call.prefix.astype(np.int32, copy=False).tobytes()
        self.number = -1


class Server:
    """A simulated server: its worker as the dispatcher sees it, what its cache holds, when its prefills end, and the requests that it computes and
    those that wait for cache room."""

    def __init__(self, name: str, tokens: float, capacity: int):
        self.worker = Worker(b"", Register(name, ["generate"], capacity, 0, ""), 0.0, "")
        self.worker.ready, self.worker.stats = True, {CAPACITY: tokens}
        self.cache, self.free_at = Prefixes(tokens), 0.0
        self.running, self.waiting = list[Asked](), deque[Asked]()

    def has_room(self) -> bool:
        """Whether the first waiting request fits into the batch and the cache beside those that are computed; alone it always does."""
        held, together = Prefixes(), (*self.running, self.waiting[0])
        for asked in together:
            held.insert(asked.tokens)
        samples = [len(sample) for asked in together for sample in asked.samples]
        return not self.running or (len(samples) <= BATCH and held.tokens + sum(samples) <= self.cache.capacity)


class World:
    """One replay. ``run`` returns when every call has been served. version: the newest that any call had; a new one empties all caches, except
    the unbounded one of the ideal."""

    def __init__(
        self,
        fleet: Fleet,
        singly: bool,
        trees: Sequence[list[Call]],
        at_once: int,
        servers: int = 1,
        tokens: float = math.inf,
    ):
        self.fleet, self.singly = fleet, singly
        fleet._clock = lambda: self.now  # pyright: ignore[reportPrivateUsage]
        self.pool = Pool()
        room = 2**30 if singly or servers == 1 else CAPACITY_CALLS
        self.servers = {f"s{n:02}": Server(f"s{n:02}", tokens, room) for n in range(servers)}
        for number, server in enumerate(self.servers.values()):
            server.worker.joined = number
            self.pool.add(server.worker)
        self.now, self.version, self.forgets = 0.0, -1, tokens < math.inf
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ties = itertools.count()
        self.waiting: list[Asked] = []
        self.left = iter(enumerate(trees))
        self.open: Counter[int] = Counter()
        self.prompt = self.prefilled = 0
        self.requests, self.computed = Counter[str](), Counter[str]()
        self.looking = False
        for _ in range(at_once):
            self._next_tree()

    def run(self) -> "World":
        while self.events or self.waiting:
            self._pump()
            if self.events:
                self.now, _, happen = heapq.heappop(self.events)
                happen()
        return self

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.ties), happen))

    def _next_tree(self) -> None:
        tree, first = next(self.left, (-1, []))
        for call in first:
            self._call(tree, call)

    def _call(self, tree: int, call: Call) -> None:
        self.open[tree] += 1
        wait = JUDGE_S * random.Random(f"{tree} {len(call.prefix)}").lognormvariate(0.0, 1.0)
        ended = lambda: self._at(self.now + wait, lambda: self._ended(tree, call))  # noqa: E731
        if not self.singly:
            self._ask(tree, call, call.samples, ended)
            return
        left = [len(call.samples)]

        def one() -> None:
            left[0] -= 1
            if not left[0]:
                ended()

        def each() -> None:
            for sample in call.samples:
                self._ask(tree, call, [sample], one)

        self._ask(tree, call, [], each)

    def _ask(self, tree: int, call: Call, samples: list[np.ndarray], then: Callable[[], None]) -> None:
        longest = max(map(len, call.samples))
        request = GenerateRequest(call.prefix, max(1, len(samples)), Sampling(longest))
        self.waiting.append(Asked(tree, call, samples, self.fleet.call(tree, request), then))

    def _pump(self) -> None:
        """Start waiting requests, as the dispatcher does."""
        self.waiting.sort(key=lambda asked: asked.place.rank())
        held, refused = list[Asked](), set[Any]()
        for at, asked in enumerate(self.waiting):
            if self.pool.least(self.now) is None:
                held += self.waiting[at:]
                break
            kind, name = asked.place.waits_with(), None
            if kind not in refused:
                name = asked.place.choose(self.pool.loads(self.now, asked.place.homes(), ()), frozenset())
            if name is None:
                refused |= {kind} - {None}
                held.append(asked)
            else:
                self._start(asked, self.servers[name])
        self.waiting = held
        if held and not self.looking:
            self.looking = True
            self._at(self.now + LOOK_S, self._looked)

    def _looked(self) -> None:
        self.looking = False

    def _start(self, asked: Asked, server: Server) -> None:
        server.worker.in_flight[number := next(self.ties)] = None  # pyright: ignore[reportArgumentType]
        asked.number = number
        self.pool.touch(server.worker)
        asked.place.started(server.worker.name)
        server.waiting.append(asked)
        self._compute(server)

    def _compute(self, server: Server) -> None:
        while server.waiting and server.has_room():
            server.running.append(asked := server.waiting.popleft())
            self._begin(asked, server)

    def _begin(self, asked: Asked, server: Server) -> None:
        if asked.call.version > self.version and self.forgets:
            self.version = asked.call.version
            for name, other in self.servers.items():
                other.cache.clear()
                self.fleet.residency.emptied(name, self.version)
        name, length = server.worker.name, len(asked.call.prefix)
        cached = server.cache.match(asked.tokens)
        cached = cached if self.singly and asked.samples else min(cached, length - 1)
        server.cache.insert(asked.tokens)
        self.prompt += length
        self.prefilled += length - cached
        self.requests[name] += max(1, len(asked.samples)) if asked.samples else 0
        self.computed[name] += length - cached + sum(map(len, asked.samples))
        server.free_at = max(self.now, server.free_at) + (length - cached) * PREFILL_S
        end = server.free_at + DECODE_S * max(map(len, asked.samples), default=0)
        version = self.version
        self._at(end, lambda: self._served(asked, server, cached, version))

    def _served(self, asked: Asked, server: Server, cached: int, version: int) -> None:
        server.running.remove(asked)
        del server.worker.in_flight[asked.number]
        self.pool.touch(server.worker)
        empty = np.zeros(0, np.float32)
        samples = [Sample(s, empty, np.full(len(s), version, np.int32), "stop") for s in asked.samples]
        if version == self.version:
            for sample in samples:
                server.cache.insert(asked.tokens + sample.tokens[:-1].astype(np.int32, copy=False).tobytes())
        asked.place.ended(server.worker.name, GenerateResult(samples, len(asked.call.prefix), cached))
        asked.then()
        self._compute(server)

    def _ended(self, tree: int, call: Call) -> None:
        for below in call.below:
            self._call(tree, below)
        self.open[tree] -= 1
        if not self.open[tree]:
            self.fleet.ended(tree)
            self._next_tree()


def balance(counts: Counter[str], servers: int) -> float:
    """Return the largest over the mean."""
    return max(counts.values()) * servers / sum(counts.values())


def row(world: World, ideal: int) -> dict[str, float]:
    """Return the values of one way. hit_rate: of the prompt tokens of all requests. balance: the largest over the mean. seconds: simulated."""
    servers = len(world.servers)
    return {
        "ratio": world.prefilled / ideal,
        "hit_rate": 1 - world.prefilled / world.prompt,
        "balance_tokens": balance(world.computed, servers),
        "balance_samples": balance(world.requests, servers),
        "seconds": world.now,
    }


def run(
    run: str = "", servers: tuple[int, ...] = (2, 8, 64), cache: float = 0.5, at_once: int = TREES, waves: int = WAVES
) -> dict[str, Any]:
    """Return the table. cache: of what the trees at once on one server need, the share that its prefix cache holds."""
    trees, tokens = recorded(run) if run else grown(), 0.0
    table: dict[str, dict[str, dict[str, float]]] = {}
    for count in servers:
        some = copies(trees, count * at_once * waves)
        ideal = World(Fleet(), False, some, count * at_once).run().prefilled
        tokens = cache * sum(map(need, some)) / len(some) * at_once
        table[f"{count} servers"] = {
            name: row(World(fleet(), singly, some, count * at_once, count, tokens).run(), ideal)
            for name, (fleet, singly) in WAYS.items()
        }
    return {
        "name": f"prefill / ideal, {servers[0]} simulated servers, recorded trees",
        "ratio": table[f"{servers[0]} servers"]["ours"]["ratio"],
        "goal": GOAL,
        "better": "lower",
        "recorded_trees": len(trees),
        "cache_tokens": int(tokens),
        **table,
    }
