"""SLATE trees on two real CPU servers: placed by the scheduler, or sent through SGLang's own router; and an update behind the router.

``OMP_NUM_THREADS=1 .venv/bin/python -m tests.sglang_cpu.router_compare ROUTER_PYTHON [--questions 16]``, where ROUTER_PYTHON is the
interpreter of an environment that has sglang-router 0.3.2: ``python3.11 -m venv ENV && ENV/bin/pip install sglang-router==0.3.2``.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.config import ActorsConfig, SGLangConfig
from actors.engines.sglang import SGLangEngine
from actors.worker import service
from scheduler.dispatch import Dispatcher
from scheduler.fleet import Fleet
from tests.actors.test_local_engine import version_folder
from tests.sglang_cpu import server
from tools.research.benches import fleet_shape
from tools.research.benches.routers import Arrival
from wire.faults import InfrastructureFault
from wire.messages import GenerateRequest, Judgement, JudgeRequest, JudgeResult, LoadRequest, Sampling
from wire.service import Call, Service

CONTEXT, TOKENS = 512, 32768
"""Tokens: the longest sequence; what one server's cache holds, more than all trees together."""
START_S = 300.0
POLICIES = {
    "round_robin": ["--policy", "round_robin"],
    "cache_aware": ["--policy", "cache_aware"],
    "cache_aware, --balance-abs-threshold 8": ["--policy", "cache_aware", "--balance-abs-threshold", "8"],
}


def free_port() -> int:
    """One on the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """GET, or POST of ``body``."""
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, payload, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def running(command: Sequence[str], environment: dict[str, str] | None, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block runs."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
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
    """Wait for a process to answer. Raises RuntimeError with its log when it ended or took too long."""
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            if ready():
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"it did not come up:\n{log.read_text()[-3000:]}")
        time.sleep(0.3)


@contextlib.contextmanager
def servers(model: Path, folder: Path, count: int) -> Iterator[list[str]]:
    """The URLs of CPU servers."""
    with contextlib.ExitStack() as stack:
        urls, started = [], []
        for number in range(count):
            port, log = free_port(), folder / f"server-{number}.log"
            line, environment = server.command(
                model, port, context_length=CONTEXT, max_total_tokens=TOKENS, max_running_requests=64,
                weight_version="0",
            )  # fmt: skip
            print("server:", " ".join(line), flush=True)
            started.append((stack.enter_context(running(line, environment, log)), log))
            urls.append(f"http://127.0.0.1:{port}")
        for url, (process, log) in zip(urls, started, strict=True):
            until(lambda url=url: ask(url + "/health") is not None, process, log)
        yield urls


@contextlib.contextmanager
def router(python: str, workers: Sequence[str], arguments: Sequence[str], folder: Path) -> Iterator[str]:
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


def engine(model: Path, url: str, workers: Sequence[str], questions: int) -> SGLangEngine:
    """One actor's engine."""
    sglang = SGLangConfig(way="url", urls=[url], workers=list(workers), update_timeout_s=60.0)
    return SGLangEngine(str(model), ActorsConfig(max_batch=20, capacity=questions, max_context=CONTEXT, sglang=sglang))


async def judge(request: JudgeRequest, call: Call) -> JudgeResult:
    """Rewards by checksum."""
    rewards = [zlib.crc32(turn.response.encode()) % 1000 / 1000 for turn in request.turns]
    return JudgeResult([Judgement({"reward": reward}) for reward in rewards])


@contextlib.asynccontextmanager
async def dispatching(folder: Path, made: Sequence[SGLangEngine]) -> AsyncIterator[Dispatcher]:
    """A dispatcher with an actor for each engine and a judge."""
    dispatcher = Dispatcher(f"ipc://{folder}/scheduler", None)
    services = [service(one, f"actor-{i}", one.config.capacity) for i, one in enumerate(made)]
    services.append(Service("judge", {f"judge.{fleet_shape.JUDGE}": judge}, 64))
    await dispatcher.start()
    for one in made:
        await one.start()
    tasks = [asyncio.create_task(one.run(dispatcher.endpoint, None, signals=False)) for one in services]
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
        float(value) for value in re.findall(r"^sglang:generation_tokens_total\S* (\S+)$", ask(url + "/metrics"), re.M)
    )


async def grow(
    model: Path, made: Sequence[SGLangEngine], workers: Sequence[str], fleet: Fleet, questions: int
) -> dict[str, Any]:
    """Grow the trees and say what they took."""
    before = [decoded(url) for url in workers]
    with tempfile.TemporaryDirectory() as scratch:
        async with dispatching(Path(scratch), made) as dispatcher:
            start = time.monotonic()
            trees = await fleet_shape.grow(dispatcher, model, Path(scratch), fleet, questions)
            seconds = time.monotonic() - start
            stats = [one.stats() for one in made]
    prompt, cached, prefilled = (
        sum(s[name] for s in stats) for name in ("prompt_tokens", "cached_tokens", "prefilled_tokens")
    )
    ideal = fleet_shape.ideal(trees)
    shares = [decoded(url) - was for url, was in zip(workers, before, strict=True)]
    return {
        "prefilled": int(prefilled), "ideal": ideal, "ratio": prefilled / ideal, "cached": cached / prompt,
        "decoded": [share / sum(shares) for share in shares], "seconds": seconds,
    }  # fmt: skip


async def update(model: Path, url: str, workers: Sequence[str], folder: Path) -> str:
    """One load through an engine on the router; what each server then holds and samples from."""
    made = engine(model, url, workers, 8)
    await made.start()
    prompt = np.arange(70, 90, dtype=np.int32)
    try:
        await made.generate(GenerateRequest(prompt, 2, Sampling(3, top_p=0.5)))
        cut = "top_p works"
    except InfrastructureFault as fault:  # the router passes on only the fields it knows
        cut = f"top_p does not work ({fault})"
    salts = [_cached(url, salt) for salt in ("a", "a", "b", "b")]
    version, digest, _ = version_folder(folder, model, 7)
    loaded = await made.load(LoadRequest(7, str(version), digest))
    held = [
        json.loads(ask(worker + "/weights_checker", {"action": "checksum"}))["per_engine_checksum"]
        for worker in workers
    ]
    told = [json.loads(ask(worker + "/model_info"))["weight_version"] for worker in workers]
    samples = [
        sample for _ in range(6) for sample in (await made.generate(GenerateRequest(prompt, 4, Sampling(4)))).samples
    ]
    versions = {int(number) for sample in samples for number in sample.versions}
    await made.close()
    assert {hashlib.sha256(checksum.encode()).hexdigest() for checksum in held} == {loaded.proof}, (held, loaded.proof)
    assert told == ["7", "7"], told
    assert versions == {7}, versions
    return (
        f"version 7 on {len(workers)} servers, checksum {loaded.proof[:16]} on each, all of {len(samples)} samples of version 7; {cut};"
        f" cached of 20 tokens under the salts a, a, b, b: {salts}"
    )


def _cached(url: str, salt: str) -> int:
    """Cached tokens of one prompt of 20 under a salt."""
    body = {"input_ids": list(range(10, 30)), "extra_key": salt, "sampling_params": {"max_new_tokens": 1}}
    return json.loads(ask(url + "/generate", body))["meta_info"]["cached_tokens"]


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
    chosen = parser.parse_args()
    count = chosen.questions
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = fleet_shape.policy(folder)
        with servers(model, folder, 2) as workers:

            def measured(name: str, fleet: Fleet, *made: SGLangEngine) -> None:
                for worker in workers:
                    ask(worker + "/flush_cache", {})
                show(name, asyncio.run(grow(model, made, workers, fleet, count)))

            print(
                f"| {count} questions | prefilled | ideal | ratio | cached | decoded by each | s |\n|---|---|---|---|---|---|---|"
            )
            measured("one server", Fleet(), engine(model, workers[0], [], count))
            measured("our placement, an actor for each", Fleet(), *(engine(model, url, [], count) for url in workers))
            for name, arguments in POLICIES.items():
                with router(chosen.router, workers, arguments, folder) as url:
                    measured(f"router, {name}", Arrival(), engine(model, url, workers, count))
            with router(chosen.router, workers, [], folder) as url:
                print("update behind the router:", asyncio.run(update(model, url, workers, folder)))


if __name__ == "__main__":
    main()
