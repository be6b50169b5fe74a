"""Updates of real CPU servers behind SGLang's own router, while a third server joins and one is
killed.

``OMP_NUM_THREADS=1 .venv/bin/python -m tests.sglang_cpu.router_compare ROUTER_PYTHON``, where
ROUTER_PYTHON is the interpreter of an environment that has sglang-router 0.3.2:
``python3.11 -m venv ENV && ENV/bin/pip install sglang-router==0.3.2``.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.common.process import free_port
from coppice.tools.defaults.tiny import make_board
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from tests.actors.test_local_engine import GREATEST_DIFFERENCE, full_logprobs, version_folder
from tests.sglang_cpu import server

CONTEXT, TOKENS = 512, 32768
"""Tokens: the longest sequence, and what one server's cache holds."""
START_S = 300.0


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
            process = stack.enter_context(running(line, environment, log))
            started.append((f"http://127.0.0.1:{port}", process, log))
        for url, process, log in started:
            until(lambda url=url: ask(url + "/health") is not None, process, log)
        yield {url: process for url, process, _ in started}


@contextlib.contextmanager
def router(python: str, workers: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a round-robin router that has found its workers healthy."""
    port, log = free_port(), folder / "router.log"
    line = [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
        "--policy", "round_robin", "--worker-urls", *workers,
    ]  # fmt: skip
    print("router:", " ".join(line), flush=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        known = json.loads(ask(url + "/workers"))["workers"]
        return sum(bool(worker["is_healthy"]) for worker in known) == len(workers)

    with running(line, None, log) as process:
        until(ready, process, log)
        yield url


def decoded(url: str) -> float:
    """Tokens that a server has sampled since it started."""
    return sum(
        float(value)
        for value in re.findall(
            r"^sglang:generation_tokens_total\S* (\S+)$", ask(url + "/metrics"), re.M
        )
    )


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
            result = await self.made.generate(GenerateRequest(prompt, 2, Sampling(4)))
            for sample in result.samples:
                # two, where an update came between its tokens
                for number in set(sample.versions.tolist()):
                    expected = full_logprobs(self.models[number], prompt, sample.tokens)
                    wrong = np.abs(expected - sample.logprobs)
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
    sglang = SGLangConfig(way="url", urls=[url], update_timeout_s=120.0)
    settings = ActorsConfig(max_batch=20, capacity=8, max_context=CONTEXT, sglang=sglang)
    made = SGLangEngine(str(model), settings)
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


def main() -> None:
    """Start three servers and a router, and update them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("router", help="the interpreter that has sglang-router")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_board(folder / "policy", hidden=32, layers=2, heads=4, intermediate=64)
        with (
            servers(model, folder, 3) as found,
            router(chosen.router, list(found)[:2], folder) as url,
        ):
            asyncio.run(update(model, url, found, folder))


if __name__ == "__main__":
    main()
