"""A judge as a worker process: requests become batches of at most ``judge.batch`` turns, scores are checked, faults classified.

``python -m judges.serve PROCESS.json`` is started by the launcher; ``tools/serve module:Class --run RUN`` plugs into a live run.
"""

import argparse
import asyncio
import importlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from judges.base import Judge, checked
from judges.exact_match import ExactMatch
from judges.llm import ChatEndpoint
from judges.slate import Slate
from judges.slate_rules import SlateRules
from wire import loop
from wire.faults import InfrastructureFault
from wire.messages import JudgedTurn, Judgement, JudgeRequest, JudgeResult
from wire.service import Call, Service
from wire.sockets import RunKeys

BUILT_IN: dict[str, Callable[..., Judge]] = {
    "exact_match": ExactMatch,
    "slate_rules": SlateRules,
    "slate": lambda endpoint, templates=None: Slate(msgspec.convert(endpoint, ChatEndpoint), templates),
}


class JudgeProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A judge process. judges: built-in name or "module:Class" -> constructor options."""

    name: str
    run: str
    judges: dict[str, dict[str, Any]]


def make_judge(spec: str, options: dict[str, Any]) -> Judge:
    """A built-in judge by name, or ``module:Class``. Raises ValueError saying what was expected."""
    if spec in BUILT_IN:
        return BUILT_IN[spec](**options)
    module, colon, name = spec.partition(":")
    if not colon:
        raise ValueError(f"judge {spec!r}: expected one of {sorted(BUILT_IN)}, or module:Class")
    sys.path.insert(0, str(Path.cwd()))
    made = getattr(importlib.import_module(module), name)(**options)
    if not isinstance(made, Judge) or not made.name or not made.columns:
        raise ValueError(f"judge {spec!r}: expected a subclass of judges.base.Judge with a name and columns")
    return made


class Batcher:
    """Turns of concurrent requests scored together, at most ``judge.batch`` at a time."""

    def __init__(self, judge: Judge):
        self.judge = judge
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._queue: asyncio.Queue[tuple[JudgedTurn, asyncio.Future[Judgement]]] = asyncio.Queue()
        self._room = asyncio.Semaphore(judge.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: JudgeRequest, call: Call) -> JudgeResult:
        """Service handler: one judgement a turn."""
        loop_ = asyncio.get_running_loop()
        waiting: list[asyncio.Future[Judgement]] = [loop_.create_future() for _ in request.turns]
        for item in zip(request.turns, waiting, strict=True):
            self._queue.put_nowait(item)
        task = asyncio.create_task(self._drain())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return JudgeResult(list(await asyncio.gather(*waiting)))
        finally:
            for future in waiting:
                future.cancel()

    async def _drain(self) -> None:
        async with self._room:
            while not self._queue.empty():
                taken = [self._queue.get_nowait() for _ in range(min(self.judge.batch, self._queue.qsize()))]
                live = [(turn, future) for turn, future in taken if not future.done()]
                if live:
                    await self._score(live)

    async def _score(self, items: list[tuple[JudgedTurn, asyncio.Future[Judgement]]]) -> None:
        start = time.monotonic()
        turns = [turn for turn, _ in items]
        scoring = asyncio.ensure_future(self.judge.score(turns))
        for _, future in items:  # a judge that hangs keeps its place only while somebody waits for it
            future.add_done_callback(lambda _: scoring.cancel() if all(f.done() for _, f in items) else None)
        try:
            judgements, bad = checked(self.judge, turns, await scoring)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.counts["abandoned"] += 1
            for _, future in items:
                if not future.done():
                    future.set_exception(InfrastructureFault(f"judge {self.judge.name} cancelled its own scoring"))
            return
        except Exception as error:  # noqa: BLE001 whatever a plug-in raises is the answer to the requests it was scoring
            self.counts["raised"] += 1
            for _, future in items:
                if not future.done():
                    future.set_exception(error)
            return
        finally:
            self.busy_s += time.monotonic() - start
        self.counts["turns"] += len(turns)
        self.counts["invalid"] += bad
        for (_, future), judgement in zip(items, judgements, strict=True):
            if not future.done():
                future.set_result(judgement)

    def stats(self) -> dict[str, float]:
        """Counters for the heartbeat."""
        own = getattr(self.judge, "stats", dict)()
        return {**self.counts, "busy_s": self.busy_s, **own}


async def serve(judges: list[Judge], name: str, endpoint: str, keys: RunKeys | None, signals: bool = True) -> None:
    """Offer ``judge.<name>`` for each judge until drained."""
    batchers = {f"judge.{judge.name}": Batcher(judge) for judge in judges}
    capacity = sum(judge.concurrency for judge in judges)

    def stats() -> dict[str, float]:
        return {f"{service}.{key}": value for service, b in batchers.items() for key, value in b.stats().items()}

    for judge in judges:
        await judge.start()
    try:
        await Service(name, {s: b.handle for s, b in batchers.items()}, capacity, stats).run(endpoint, keys, signals)
    finally:
        for judge in judges:
            await judge.close()


def connection(run: Path) -> tuple[str, RunKeys]:
    """Endpoint and keys of a started run; raises FileNotFoundError with the remedy."""
    try:
        return (run / "endpoint").read_text().strip(), RunKeys.load(run / "keys")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{run} is not a started run ({error}): start it with tools/launch first") from None


def plug_in(arguments: list[str] | None = None) -> None:
    """The command tools/serve."""
    parser = argparse.ArgumentParser(prog="tools/serve", description="Plug a judge into a live run.")
    parser.add_argument("judge", help="module:Class, or a built-in name")
    parser.add_argument("--run", required=True, type=Path, help="folder of the live run")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="constructor option")
    parser.add_argument("--name", default=None, help="worker name (default: the judge's)")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    judge = make_judge(given.judge, dict(option.split("=", 1) for option in given.option))
    endpoint, keys = connection(given.run)
    print(f"serving judge.{judge.name} {list(judge.columns)} to {endpoint}; Ctrl-C drains and leaves", flush=True)
    loop.run(serve([judge], given.name or f"{judge.name}-plugin", endpoint, keys))


def main() -> None:
    """The launcher's judge process."""
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeProcess)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    judges = [make_judge(spec, options) for spec, options in process.judges.items()]
    endpoint, keys = connection(Path(process.run))
    loop.run(serve(judges, process.name, endpoint, keys))


if __name__ == "__main__":
    main()
