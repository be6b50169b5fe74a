"""The scripted peers of the ``load`` benchmark: real services on real sockets with real keys, whose answers cost next to nothing.

``main(RUN, ROLE)`` runs the peers of one role in a process of its own. Actors sample without a model, judges join and leave all the time, and
the learner takes its time for each update and keeps its own record, so that an audit need not believe the scheduler.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from scheduler.fleet import CAPACITY
from wire import digest, frontier, loop
from wire.keys import PeerKeys
from wire.messages import (
    Closed,
    GenerateRequest,
    GenerateResult,
    Judgement,
    JudgeRequest,
    JudgeResult,
    LoadRequest,
    LoadResult,
    Passage,
    RetrieveRequest,
    RetrieveResult,
    Sample,
    Trained,
    TrainGroup,
    TreeClosed,
)
from wire.service import UNBOUNDED, Call, Handler, Service

FAST, SLOW = "fast", "exact_match"
"""The judge of every turn, and the judge of every tree's outcome."""
SECONDS = {FAST: 0.001, SLOW: 1.0}
COLUMNS = {FAST: ("think", "query", "answer"), SLOW: ("outcome", "f1")}
AT_ONCE = 16
"""The number of requests that a judge answers at once."""
VANISHES = 0.1
"""The share of judges that die without a word; the others drain."""
CACHE = 2**18
"""Tokens that an actor's cache holds, as a GPU's might."""
ROLES = ("actor", "judge", "learner")


class Plan(msgspec.Struct, frozen=True):
    """What the peers do, in RUN/load.json. questions: trees of an update. update_s: the time that an update takes. stay_s: how long a judge
    stays, on average. judges: how many are there, half of them fast. act, forced: token ids of an action and of a forced answer."""

    questions: int
    update_s: float
    judges: int
    stay_s: float
    act: list[int]
    forced: list[int]


class Actor:
    """Samples the same action again and again. Life cycle: its handlers are called by a ``Service``."""

    def __init__(self, plan: Plan):
        self.plan, self.version = plan, 0

    async def generate(self, request: GenerateRequest, call: Call) -> GenerateResult:
        forced = request.sampling.stop == ["</answer>"]
        tokens = np.array(self.plan.forced if forced else self.plan.act, np.int32)
        sample = Sample(
            tokens, np.full(len(tokens), -1, np.float32), np.full(len(tokens), self.version, np.int32), "stop"
        )
        return GenerateResult([sample] * request.n, len(request.tokens), 0)

    async def load(self, request: LoadRequest, call: Call) -> LoadResult:
        self.version = request.version
        return LoadResult(request.version, request.digest, 0.0)


async def retrieve(request: RetrieveRequest, call: Call) -> RetrieveResult:
    """Find the same passage for every query."""
    return RetrieveResult(
        [[Passage("1", "Peru", "The capital of Peru is Lima, on the coast.", 1.0)]] * len(request.queries)
    )


def judging(kind: str, rng: random.Random) -> Handler:
    """Return the handler of a judge, which takes its time and gives random scores."""

    async def judge(request: JudgeRequest, call: Call) -> JudgeResult:
        await asyncio.sleep(SECONDS[kind])
        return JudgeResult([Judgement({column: rng.random() for column in COLUMNS[kind]}) for _ in request.turns])

    return judge


async def come_and_go(place: int, plan: Plan, endpoint: str, keys: PeerKeys) -> None:
    """Keep one judge's place filled: each judge stays for a while and leaves, and another one comes under a new name, until dismissed."""
    rng, kind = random.Random(place), (FAST, SLOW)[place % 2]
    for life in itertools.count():
        service = Service(f"{kind}-{place}-{life}", {f"judge.{kind}": judging(kind, rng)}, AT_ONCE)
        running = asyncio.create_task(service.run(endpoint, keys, signals=False))
        await asyncio.wait([running], timeout=rng.expovariate(1 / plan.stay_s))
        if running.done() and running.exception() is None:
            return
        if rng.random() < VANISHES:
            running.cancel()
        else:
            service.drain()
        await asyncio.gather(running, return_exceptions=True)


class Learner:
    """Trains the oldest closed trees whose groups are all here, ``questions`` at a time. trained: the version of each group."""

    def __init__(self, run: Path, plan: Plan):
        self.run, self.plan, self.version = run, plan, 0
        self.here: set[int] = set()
        self.trained: dict[int, int] = {}
        self.closed: dict[int, list[int]] = {}
        self.answers: dict[int, asyncio.Future[Trained]] = {}
        self.news = asyncio.Event()
        self.announce()

    def announce(self) -> None:
        """Publish the version, and write its checkpoint."""
        folder = self.run / "checkpoints" / f"v{self.version:06d}"
        if self.version:
            folder.mkdir(parents=True)
            state = frontier.Frontier(self.version, frontier.runs(self.trained))
            (folder / frontier.FILE).write_bytes(msgspec.json.encode(state))
            digest.write_sums(folder, {frontier.FILE: digest.file(folder / frontier.FILE)})
        said = {"version": self.version, "path": str(self.run / "weights" / folder.name), "digest": folder.name}
        (self.run / "learner.json").write_bytes(msgspec.json.encode(said))

    async def train(self, group: TrainGroup, call: Call) -> Trained:
        self.here.add(group.id)
        self.news.set()
        answer = self.answers.setdefault(group.id, asyncio.get_running_loop().create_future())
        return await asyncio.shield(answer)  # a lost connection cancels this handler, and the group is sent again

    async def close(self, closed: TreeClosed, call: Call) -> Closed:
        self.closed.setdefault(closed.tree, closed.groups)
        self.news.set()
        return Closed()

    async def work(self) -> None:
        """Make update after update."""
        while True:
            await self.news.wait()
            self.news.clear()
            whole = sorted(tree for tree, groups in self.closed.items() if self.here.issuperset(groups))
            whole = whole[: self.plan.questions]
            if len(whole) < self.plan.questions:
                continue
            groups = [group for tree in whole for group in self.closed.pop(tree)]
            self.here.difference_update(groups)
            await asyncio.sleep(self.plan.update_s)
            self.version += 1
            self.trained |= dict.fromkeys(groups, self.version)
            self.announce()
            path, counted = str(self.run / "weights" / f"v{self.version:06d}"), {"learner/groups": float(len(groups))}
            for group in groups:
                self.answers.pop(group).set_result(Trained(self.version, path, f"v{self.version:06d}", counted))
            self.news.set()


async def serve(run: Path, role: str) -> None:
    """Run the peers of a role until the scheduler dismisses them."""
    plan = msgspec.json.decode((run / "load.json").read_bytes(), type=Plan)
    while not (run / "endpoint").exists():
        await asyncio.sleep(0.1)
    endpoint, keys = (run / "endpoint").read_text(), PeerKeys.load(run / "keys", role)
    if role == "judge":
        await asyncio.gather(*(come_and_go(place, plan, endpoint, keys) for place in range(plan.judges)))
    elif role == "learner":
        learner = Learner(run, plan)
        working = asyncio.create_task(learner.work())
        handlers: dict[str, Handler] = {"train": learner.train, "close": learner.close}
        await Service("learner", handlers, UNBOUNDED, give_up_s=600.0).run(endpoint, keys)
        working.cancel()
    else:
        stats: Callable[[], dict[str, float]] = lambda: {CAPACITY: float(CACHE)}  # noqa: E731
        actors = [(f"actor-{i}", Actor(plan)) for i in range(2)]
        services = [Service(name, {"generate": a.generate, "load": a.load}, 64, stats) for name, a in actors]
        search = Service("retriever", {"retrieve": retrieve}, 64)
        running = [service.run(endpoint, keys, signals=False) for service in services]
        running.append(search.run(endpoint, PeerKeys.load(run / "keys", "retriever"), signals=False))
        await asyncio.gather(*running)


def main(run: str, role: str) -> None:
    """Run the process of one role."""
    loop.run(serve(Path(run), role))
