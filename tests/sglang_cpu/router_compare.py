"""SLATE trees on two real CPU servers: placed by the scheduler, or sent through SGLang's own
router; and updates behind the router while a third server joins and one is killed.

``OMP_NUM_THREADS=1 .venv/bin/python -m tests.sglang_cpu.router_compare ROUTER_PYTHON [--questions
16 | --update-only]``, where ROUTER_PYTHON is the interpreter of an environment that has
sglang-router 0.3.2: ``python3.11 -m venv ENV && ENV/bin/pip install sglang-router==0.3.2``.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.actors.environments.base import Task
from coppice.actors.worker import service
from coppice.common.process import free_port
from coppice.research.benches.any_text import AnyText, Shape
from coppice.scheduler.concurrency import gather
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.dispatch.placement import Place
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.strategies import slate
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.fleet import Fleet
from coppice.tools.defaults.tiny_board import make_tiny_policy
from coppice.wire.messages import (
    GenerateRequest,
    Judgement,
    JudgeRequest,
    JudgeResult,
    LoadRequest,
    Sampling,
)
from coppice.wire.service import Call, Service
from tests.actors.test_local_engine import GREATEST_DIFFERENCE, full_logprobs, version_folder
from tests.sglang_cpu import server

CONTEXT, TOKENS = 512, 32768
"""Tokens: the longest sequence; what one server's cache holds, more than all trees together."""
START_S = 300.0
HEAD, QUESTION, OBSERVATION, ACTION = 120, 30, 60, 16
"""Lengths in tokens: the text that begins all prompts, the text that a question adds, an
observation, the longest action."""
STEPS, CANDIDATES = 4, 5
JUDGE = "bench"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Each is one token of the tiny policy, so all lengths are known."""
POLICIES = {
    "round_robin": ["--policy", "round_robin"],
    "cache_aware": ["--policy", "cache_aware"],
    "cache_aware, --balance-abs-threshold 8": [
        "--policy",
        "cache_aware",
        "--balance-abs-threshold",
        "8",
    ],
}


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """GET, or POST of ``body``."""
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, payload, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: dict[str, str] | None, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block runs."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children share its session
        process.wait()


def until(ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a process to answer. Raises RuntimeError with its log when it ended or took too
    long."""
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            if ready():
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"it did not come up:\n{log.read_text()[-3000:]}")
        time.sleep(0.3)


@contextlib.contextmanager
def servers(model: Path, folder: Path, count: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The processes of CPU servers by their URLs."""
    with contextlib.ExitStack() as stack:
        started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        for number in range(count):
            port, log = free_port(), folder / f"server-{number}.log"
            line, environment = server.command(
                model, port, context_length=CONTEXT, max_total_tokens=TOKENS, max_running_requests=64,
                weight_version="0", grammar_backend="none",
            )  # fmt: skip
            print("server:", " ".join(line), flush=True)
            started.append(
                (
                    f"http://127.0.0.1:{port}",
                    stack.enter_context(running(line, environment, log)),
                    log,
                )
            )
        for url, process, log in started:
            until(lambda url=url: ask(url + "/health") is not None, process, log)
        yield {url: process for url, process, _ in started}


@contextlib.contextmanager
def router(
    python: str, workers: Sequence[str], arguments: Sequence[str], folder: Path
) -> Iterator[str]:
    """The URL of a router that has found its workers healthy."""
    port, log = free_port(), folder / "router.log"
    line = [
        python,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        *workers,
    ]
    line += ["--prometheus-port", str(free_port()), *arguments]
    print("router:", " ".join(line), flush=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        known = json.loads(ask(url + "/workers"))["workers"]
        return sum(bool(worker["is_healthy"]) for worker in known) == len(workers)

    with running(line, None, log) as process:
        until(ready, process, log)
        yield url


def engine(model: Path, url: str, questions: int) -> SGLangEngine:
    """One actor's engine."""
    sglang = SGLangConfig(way="url", urls=[url], update_timeout_s=120.0)
    return SGLangEngine(
        str(model),
        ActorsConfig(max_batch=20, capacity=questions, max_context=CONTEXT, sglang=sglang),
    )


async def judge(request: JudgeRequest, call: Call) -> JudgeResult:
    """Rewards by checksum."""
    rewards = [zlib.crc32(turn.response.encode()) % 1000 / 1000 for turn in request.turns]
    return JudgeResult([Judgement({"reward": reward}) for reward in rewards])


@contextlib.asynccontextmanager
async def dispatching(folder: Path, made: Sequence[SGLangEngine]) -> AsyncIterator[Dispatcher]:
    """A dispatcher with an actor for each engine and a judge."""
    dispatcher = Dispatcher(f"ipc://{folder}/scheduler", None)
    services = [service(one, f"actor-{i}", one.config.capacity) for i, one in enumerate(made)]
    services.append(Service("judge", {f"judge.{JUDGE}": judge}, 64))
    await dispatcher.start()
    for one in made:
        await one.start()
    tasks = [
        asyncio.create_task(one.run(dispatcher.endpoint, None, signals=False)) for one in services
    ]
    try:
        await dispatcher.wait_for("generate", len(made), 60)
        yield dispatcher
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await dispatcher.close()
        for one in made:
            await one.close()


def decoded(url: str) -> float:
    """Tokens that a server has sampled since it started."""
    return sum(
        float(value)
        for value in re.findall(
            r"^sglang:generation_tokens_total\S* (\S+)$", ask(url + "/metrics"), re.M
        )
    )


class Arrival(Fleet):
    """Serves calls in order of arrival on the least loaded actor, without knowledge of prefixes."""

    def call(self, tree: int, request: GenerateRequest, background: bool = False) -> Place:
        """See ``Fleet.call``."""
        return Place()


def distinct(prompts: Sequence[np.ndarray]) -> int:
    """Count the tokens of the prompts, each common prefix once."""
    return len({tokens[:end].tobytes() for tokens in prompts for end in range(1, len(tokens) + 1)})


def ideal(trees: Sequence[Tree]) -> int:
    """Count the prompt tokens that one unbounded cache computes: the first prompts, then the
    observations, each with the last token of the action before it, which was sampled but never
    computed."""
    later = [node for tree in trees for node in tree.nodes.values() if node.kind == "observation"]
    return distinct([tree.nodes[0].tokens for tree in trees]) + sum(
        1 + len(node.tokens) for node in later
    )


async def grown(
    dispatcher: Dispatcher, model: Path, folder: Path, fleet: Fleet, questions: int
) -> list[Tree]:
    """Grow ``questions`` trees concurrently. The environment reads any text as an action; its
    questions are one character shorter, because the template adds a newline."""
    environment = AnyText(Shape(STEPS, HEAD, QUESTION - 1, OBSERVATION), LETTERS)
    settings = SchedulerConfig(budget=STEPS, judge=JUDGE, max_action_tokens=ACTION)
    journal = Journal(folder / "journal.sqlite")
    runtime = Runtime(
        dispatcher,
        journal,
        Text(str(model)),
        environment,
        settings,
        Counter(),
        lambda tree, turns: None,
        fleet=fleet,
    )

    async def one(number: int) -> Tree:
        tree = Tree(number, str(number))
        context = Context(runtime, Task(str(number), seed=number), tree, random.Random(number))
        await context.plant()
        await slate.grow(tree, context, CANDIDATES)
        fleet.ended(tree.id)
        dispatcher.look_again("generate")
        return tree

    try:
        return await gather(one(number) for number in range(questions))
    finally:
        journal.close()


async def grow(
    model: Path, made: Sequence[SGLangEngine], workers: Sequence[str], fleet: Fleet, questions: int
) -> dict[str, Any]:
    """Grow the trees and say what they took."""
    before = [decoded(url) for url in workers]
    with tempfile.TemporaryDirectory() as scratch:
        async with dispatching(Path(scratch), made) as dispatcher:
            start = time.monotonic()
            trees = await grown(dispatcher, model, Path(scratch), fleet, questions)
            seconds = time.monotonic() - start
            stats = [one.stats() for one in made]
    prompt, cached, prefilled = (
        sum(s[name] for s in stats)
        for name in ("prompt_tokens", "cached_tokens", "prefilled_tokens")
    )
    least = ideal(trees)
    shares = [decoded(url) - was for url, was in zip(workers, before, strict=True)]
    return {
        "prefilled": int(prefilled), "ideal": least, "ratio": prefilled / least, "cached": cached / prompt,
        "decoded": [share / sum(shares) for share in shares], "seconds": seconds,
    }  # fmt: skip


PROMPT = np.arange(70, 90, dtype=np.int32)


class Going:
    """Generation without a pause, behind the router. Every token is compared with the model of the
    version that it bears."""

    def __init__(self, made: SGLangEngine, models: dict[int, Any]):
        self.made, self.models = made, models
        self.counts: Counter[int] = Counter()
        self.worst = 0.0
        self.tasks = [asyncio.create_task(self._go_on(index)) for index in range(3)]

    async def _go_on(self, index: int) -> None:
        for turn in itertools.count():
            prompt = np.append(PROMPT, np.int32(10 + (7 * turn + index) % 60))
            for sample in (
                await self.made.generate(GenerateRequest(prompt, 2, Sampling(4)))
            ).samples:
                # two, where an update came between its tokens
                for number in set(sample.versions.tolist()):
                    wrong = np.abs(
                        full_logprobs(self.models[number], prompt, sample.tokens) - sample.logprobs
                    )
                    self.worst = max(self.worst, float(wrong[sample.versions == number].max()))
                self.counts[int(sample.versions[-1])] += 1

    async def more(self, count: int = 12) -> None:
        """Wait for more samples."""
        until = sum(self.counts.values()) + count
        while sum(self.counts.values()) < until:
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def update(
    model: Path, url: str, found: dict[str, subprocess.Popen[bytes]], folder: Path
) -> None:
    """Updates through an engine on the router while requests go on: a third server joins after
    version 7, and the first is killed before version 8. Say what each server then holds and what
    was sampled."""
    made = engine(model, url, 8)
    await made.start()
    first, second, third = found
    versions = {number: version_folder(folder, model, number) for number in (7, 8)}
    base = version_folder(folder, model, 0, noise=0.0)[2]
    going = Going(made, {0: base} | {number: one[2] for number, one in versions.items()})
    try:
        await going.more()
        proofs = [(await made.load(LoadRequest(7, str(versions[7][0]), versions[7][1]))).proof]
        await going.more()
        start = time.monotonic()
        ask(url + "/workers", {"url": third})
        while len(made.way.servers) < 3:
            await going.more(1)
        joined = time.monotonic() - start
        before = decoded(third)
        while decoded(third) <= before + 8:  # it takes part
            await going.more(1)
        assert held(first) == held(second) == held(third)
        assert _proof(third) == proofs[0]
        os.killpg(found[first].pid, signal.SIGKILL)
        proofs.append((await made.load(LoadRequest(8, str(versions[8][0]), versions[8][1]))).proof)
        assert {_proof(second), _proof(third)} == {proofs[1]}
        counts = Counter(going.counts)
        await going.more(24)
        assert going.counts - counts == Counter(
            {8: sum(going.counts.values()) - sum(counts.values())}
        )
        assert going.worst < GREATEST_DIFFERENCE, going.worst
    finally:
        await going.end()
        asked_again = made.counts["asked_again"]
        await made.close()
    print(
        f"updates behind the router: the third server held version 7 {joined:.1f} s after POST /workers; the first was killed; version 8 on"
        f" the two others, checksum {proofs[1][:16]}; samples by their last version {dict(sorted(going.counts.items()))}, each with its version's"
        f" log-probabilities within {going.worst:.1e}; {asked_again} requests asked again, none failed"
    )


def held(url: str) -> str:
    """The checksum of a server's weights."""
    return json.loads(ask(url + "/weights_checker", {"action": "checksum"}))["per_engine_checksum"]


def _proof(url: str) -> str:
    return hashlib.sha256(held(url).encode()).hexdigest()


def show(name: str, row: dict[str, Any]) -> None:
    """One line of the table."""
    shares = " / ".join(f"{share:.0%}" for share in row["decoded"])
    print(
        f"| {name} | {row['prefilled']} | {row['ideal']} | {row['ratio']:.2f} | {row['cached']:.1%} | {shares} | {row['seconds']:.0f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("router", help="the interpreter that has sglang-router")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--update-only", action="store_true", help="leave out the table")
    chosen = parser.parse_args()
    count = chosen.questions
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_tiny_policy(folder / "policy", hidden=32, layers=2, heads=4, intermediate=64)
        with servers(model, folder, 3) as found:
            workers = list(found)[:2]

            def measured(name: str, fleet: Fleet, *made: SGLangEngine) -> None:
                for worker in workers:
                    ask(worker + "/flush_cache", {})
                show(name, asyncio.run(grow(model, made, workers, fleet, count)))

            if not chosen.update_only:
                print(
                    f"| {count} questions | prefilled | ideal | ratio | cached | decoded by each | s |"
                )
                print("|---|---|---|---|---|---|---|")
                measured("one server", Fleet(), engine(model, workers[0], count))
                measured(
                    "our placement, an actor for each",
                    Fleet(),
                    *(engine(model, url, count) for url in workers),
                )
                for name, arguments in POLICIES.items():
                    with router(chosen.router, workers, arguments, folder) as url:
                        measured(f"router, {name}", Arrival(), engine(model, url, count))
            with router(chosen.router, workers, ["--policy", "round_robin"], folder) as url:
                asyncio.run(update(model, url, found, folder))


if __name__ == "__main__":
    main()
