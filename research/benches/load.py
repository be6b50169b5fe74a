"""The scheduler under load: its own process with sockets, keys and journal, thousands of trees in
flight, judges that join and leave, a slow learner.

Its peers are real services whose answers cost next to nothing. The learner keeps its own record, so
that an audit need not believe the scheduler. ``coppice dev bench load --set keep=RUN`` keeps the
run folder, whose load.jsonl has the curve."""

import asyncio
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from coppice.common import frontier, loop
from coppice.common.numbers import Count, NotNegative
from coppice.research.benches import result
from coppice.scheduler import main as scheduling
from coppice.scheduler.config import EvaluationConfig, SchedulerConfig, SchedulerProcess
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.scheduler.dispatch.placement import CAPACITY
from coppice.scheduler.growth.tree import Tree
from coppice.tools.defaults.settings import importable
from coppice.tools.inspecting.audit import audit
from coppice.wire import digest
from coppice.wire import messages as wire
from coppice.wire.keys import PeerKeys
from coppice.wire.service import UNBOUNDED, Call, Handler, Service

TICK_S = 0.01
"""The interval of the timer whose delay is the event loop's lag."""
ACTION = (
    "<think> The question asks for a city, so I search. </think><search> capital of Peru </search>"
)
FAST, SLOW = "fast", "exact_match"
"""The judge of every turn, and the judge of every tree's outcome."""
SECONDS = {FAST: 0.001, SLOW: 1.0}
SCORES = {FAST: ("think", "query", "answer"), SLOW: ("outcome", "f1")}
AT_ONCE = 16
"""The number of requests that a judge answers at once."""
VANISHES = 0.1
"""The share of judges that die without a word; the others drain."""
CACHE = 2**18
"""Tokens that an actor's cache holds, as a GPU's might."""
ROLES = ("actor", "judge", "learner")
UPDATES = 20


# ---------------------------------------------------------------------------------------- the peers


class LoadPlan(msgspec.Struct, frozen=True):
    """What the peers do, in RUN/load.json. questions: trees of an update. update_s: the time that
    an update takes. stay_s: how long a judge stays, on average. judges: how many are there, half of
    them fast. act, forced: token ids of an action and of a forced answer."""

    questions: int
    update_s: float
    judges: int
    stay_s: float
    act: list[int] = []
    forced: list[int] = []


class Actor:
    """Samples the same action again and again. Life cycle: its handlers are called by a
    ``Service``."""

    def __init__(self, plan: LoadPlan):
        self.plan, self.version = plan, 0

    async def generate(self, request: wire.GenerateRequest, call: Call) -> wire.GenerateResult:
        forced = request.sampling.stop == ["</answer>"]
        tokens = np.array(self.plan.forced if forced else self.plan.act, np.int32)
        sample = wire.Sample(
            tokens, np.full(len(tokens), -1, np.float32),
            np.full(len(tokens), self.version, np.int32), "stop",
        )  # fmt: skip
        return wire.GenerateResult([sample] * request.n, len(request.tokens), 0)

    async def load(self, request: wire.LoadRequest, call: Call) -> wire.LoadResult:
        self.version = request.version
        return wire.LoadResult(request.version, request.digest, 0.0)


async def retrieve(request: wire.RetrieveRequest, call: Call) -> wire.RetrieveResult:
    """Find the same passage for every query."""
    passage = wire.Passage("1", "Peru", "The capital of Peru is Lima, on the coast.", 1.0)
    return wire.RetrieveResult([[passage]] * len(request.queries))


def judging(kind: str, rng: random.Random) -> Handler:
    """Return the handler of a judge, which takes its time and gives random scores."""

    async def judge(request: wire.JudgeRequest, call: Call) -> wire.JudgeResult:
        await asyncio.sleep(SECONDS[kind])
        scores = [{column: rng.random() for column in SCORES[kind]} for _ in request.turns]
        return wire.JudgeResult([wire.Judgement(one) for one in scores])

    return judge


async def come_and_go(place: int, plan: LoadPlan, endpoint: str, keys: PeerKeys) -> None:
    """Keep one judge's place filled: each judge stays for a while and leaves, and another one comes
    under a new name, until dismissed."""
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
    """Trains the oldest closed trees whose groups are all here, ``questions`` at a time. trained:
    the version of each group."""

    def __init__(self, run: Path, plan: LoadPlan):
        self.run, self.plan, self.version = run, plan, 0
        self.here: set[int] = set()
        self.trained: dict[int, int] = {}
        self.closed: dict[int, list[int]] = {}
        self.answers: dict[int, asyncio.Future[wire.Trained]] = {}
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
        path = str(self.run / "weights" / folder.name)
        said = {"version": self.version, "path": path, "digest": folder.name}
        (self.run / "learner.json").write_bytes(msgspec.json.encode(said))

    async def train(self, group: wire.TrainGroup, call: Call) -> wire.Trained:
        self.here.add(group.id)
        self.news.set()
        answer = self.answers.setdefault(group.id, asyncio.get_running_loop().create_future())
        # a lost connection cancels this handler, and the group is sent again
        return await asyncio.shield(answer)

    async def close(self, closed: wire.TreeClosed, call: Call) -> wire.Closed:
        self.closed.setdefault(closed.tree, closed.groups)
        self.news.set()
        return wire.Closed()

    async def work(self) -> None:
        """Make update after update."""
        while True:
            await self.news.wait()
            self.news.clear()
            complete = (
                tree for tree, groups in self.closed.items() if self.here.issuperset(groups)
            )
            whole = sorted(complete)[: self.plan.questions]
            if len(whole) < self.plan.questions:
                continue
            groups = [group for tree in whole for group in self.closed.pop(tree)]
            self.here.difference_update(groups)
            await asyncio.sleep(self.plan.update_s)
            self.version += 1
            self.trained |= dict.fromkeys(groups, self.version)
            self.announce()
            path = str(self.run / "weights" / f"v{self.version:06d}")
            counted = {"learner/groups": float(len(groups))}
            trained = wire.Trained(self.version, path, f"v{self.version:06d}", counted)
            for group in groups:
                self.answers.pop(group).set_result(trained)
            self.news.set()


async def serve(run: Path, role: str) -> None:
    """Run the peers of a role until the scheduler dismisses them."""
    plan = msgspec.json.decode((run / "load.json").read_bytes(), type=LoadPlan)
    while not (run / "endpoint").exists():
        await asyncio.sleep(0.1)
    endpoint, keys = (run / "endpoint").read_text(), PeerKeys.load(run / "keys", role)
    if role == "judge":
        places = range(plan.judges)
        await asyncio.gather(*(come_and_go(place, plan, endpoint, keys) for place in places))
    elif role == "learner":
        learner = Learner(run, plan)
        working = asyncio.create_task(learner.work())
        handlers: dict[str, Handler] = {"train": learner.train, "close": learner.close}
        await Service("learner", handlers, UNBOUNDED, give_up_s=600.0).run(endpoint, keys)
        working.cancel()
    else:
        searching = PeerKeys.load(run / "keys", "retriever")
        search = Service("retriever", {"retrieve": retrieve}, 64)
        running = [search.run(endpoint, searching, signals=False)]
        for number in range(2):
            actor = Actor(plan)
            handlers = {"generate": actor.generate, "load": actor.load}
            service = Service(f"actor-{number}", handlers, 64, lambda: {CAPACITY: float(CACHE)})
            running.append(service.run(endpoint, keys, signals=False))
        await asyncio.gather(*running)


def peers(run: str, role: str) -> None:
    """Run the process of one role of ``ROLES``."""
    loop.run(serve(Path(run), role))


# ------------------------------------------------------------------------------------ the scheduler


class Probed(scheduling.Run):
    """The scheduler's run, which writes a line of RUN/load.jsonl every ``EVERY_S`` seconds. Lags
    are in milliseconds."""

    EVERY_S = 60.0

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.trees: weakref.WeakSet[Tree] = weakref.WeakSet()
        self.lags: list[float] = []
        self._grow, self.open_trees._grow = self.open_trees._grow, self._watched_grow

    async def _watched_grow(self, tree: Tree, context: Any) -> None:
        self.trees.add(tree)
        await self._grow(tree, context)

    async def main(self) -> None:
        """Do the run, with the timer beside it."""
        timer = asyncio.create_task(self._watch())
        try:
            await super().main()
        finally:
            timer.cancel()
            self._sample()

    async def _watch(self) -> None:
        while True:
            end = time.perf_counter() + self.EVERY_S
            while (start := time.perf_counter()) < end:
                await asyncio.sleep(TICK_S)
                self.lags.append(1e3 * (time.perf_counter() - start - TICK_S))
            self._sample()

    def _sample(self) -> None:
        pacing, trees = getattr(self, "pacing", None), list(self.trees)
        files = [self.folder / f"journal.sqlite{end}" for end in ("", "-wal")]
        values = {
            "t": time.monotonic() - scheduling.scheduler.STARTED, "cpu": time.process_time(),
            "trees": pacing.admitted - pacing.version * pacing.questions if pacing else 0,
            "nodes": sum(len(tree.nodes) for tree in trees),
            "rss_mib": psutil.Process().memory_info().rss / 2**20,
            "journal_mib": sum(file.stat().st_size for file in files if file.exists()) / 2**20,
            "workers": len(self.dispatcher.workers()),
            "open": Counter(call.service for call in self.dispatcher.open_calls()),
        }  # fmt: skip
        lags = np.quantile(self.lags or [0.0], (0.5, 0.99, 1.0)).tolist()
        values |= dict(zip(("lag_p50", "lag_p99", "lag_max"), lags, strict=True))
        with (self.folder / "load.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(values) + b"\n")
        self.lags = []


def scheduler(every_s: float) -> None:
    """Run the scheduler's process, whose process file is the last argument, with the probe."""
    Probed.EVERY_S, scheduling.Run = every_s, Probed  # pyright: ignore
    scheduling.main()


def prepare(
    run: Path, trees: int, steps: int, questions: int, updates: int, plan: LoadPlan,
    timing: DispatchConfig = DispatchConfig(),
) -> None:  # fmt: skip
    """Write what the processes read: tokenizer, tasks, prompt, the peers' plan and the scheduler's
    process file."""
    from coppice.tools.defaults.tiny import board_tokenizer

    run.mkdir(parents=True, exist_ok=True)
    words = board_tokenizer().backend_tokenizer
    words.save(str(run / "tokenizer.json"))
    (run / "prompt.txt").write_text("Answer the question. You may search. Question: {question}")
    question = "What is the capital of country {}?"
    rows = [
        {"id": str(i), "question": question.format(i), "golden_answers": ["Lima"]}
        for i in range(trees)
    ]
    (run / "train.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    plan = msgspec.structs.replace(
        plan, act=words.encode(ACTION).ids, forced=words.encode("Lima</answer>").ids
    )
    (run / "load.json").write_bytes(msgspec.json.encode(plan))
    settings = SchedulerConfig(
        budget=steps, judge=FAST, updates=updates, questions_per_update=questions,
        max_staleness=trees // questions - 1, evaluation=EvaluationConfig(questions=0),
        dispatch=timing,
    )  # fmt: skip
    tasks, options = str(run / "train.jsonl"), {"prompt": str(run / "prompt.txt")}
    process = SchedulerProcess(
        "scheduler", str(run), 0, str(run), "search_qa", options, tasks, tasks, 2, ["retrieve"], 64,
        settings,
    )  # fmt: skip
    (run / "scheduler.json").write_bytes(msgspec.json.encode(process))
    (run / "config.json").write_bytes(msgspec.json.encode({"scheduler": settings}))


def measure(run: Path, every_s: float) -> None:
    """Run the scheduler and its peers to the end. Raises RuntimeError, with the end of its log, if
    the scheduler fails."""
    module, environment = "coppice.research.benches", os.environ | {"PYTHONPATH": str(importable())}
    code = [f"from {module} import load; load.scheduler({every_s})"]
    code += [f"from {module} import load; load.peers({str(run)!r}, {role!r})" for role in ROLES]
    logs = [(run / f"{name}.log").open("wb") for name in ("scheduler", *ROLES)]
    children = []
    for text, log in zip(code, logs, strict=True):
        command = [sys.executable, "-c", text, str(run / "scheduler.json")]
        children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        status = children[0].wait()
    finally:
        for child in children:
            child.kill()
            child.wait()
    if status:
        end = (run / "scheduler.log").read_text()[-3000:]
        raise RuntimeError(f"the scheduler ended with status {status}: {end}")


def figures(run: Path) -> dict[str, Any]:
    """Return the figures of a run. Memory of a node is what the process grew by, over the nodes in
    memory."""
    lines = [msgspec.json.decode(line) for line in (run / "load.jsonl").read_bytes().splitlines()]
    fullest = max(lines, key=lambda line: line["nodes"])
    most = {n: max(line[n] for line in lines) for n in ("trees", "nodes", "rss_mib", "lag_max")}
    median = {n: statistics.median(line[n] for line in lines) for n in ("lag_p50", "lag_p99")}
    return most | median | {
        "journal_mib": lines[-1]["journal_mib"],
        "bytes_per_node": 2**20 * fullest["rss_mib"] / max(1, fullest["nodes"]),
        "violations": [str(violation) for violation in audit(run)[:5]], "last": lines[-1],
    }  # fmt: skip


def run(
    trees: Count = 10_000, nodes: Count = 200_000, questions: Count = 1000,
    minutes: NotNegative = 5.0, keep: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the largest number of trees in flight over the bound of admission, whose goal is at
    most 1, with all figures.

    trees: in flight, ``questions`` to an update. minutes: the time that the learner takes for all
    updates together. keep: the run folder, a new one.
    """
    folder = Path(keep or tempfile.mkdtemp())
    try:
        plan = LoadPlan(questions, 60 * minutes / UPDATES, judges=64, stay_s=20.0)
        prepare(folder, trees, max(1, nodes // trees // 6), questions, UPDATES, plan)
        measure(folder, every_s=10.0)
        measured = figures(folder)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    ratio = measured["trees"] / (trees // questions * questions)
    name = "load: trees in flight over the bound of admission"
    return result(name, ratio, 1.0, "lower", **measured)
