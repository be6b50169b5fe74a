"""The first evaluation beside the first update: its result is of version 0 alone, whatever the
learner did meanwhile. A resume refuses a journal that is older than the checkpoint."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.scheduler.config import EvaluationConfig, SchedulerConfig, SchedulerProcess
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.scheduler.evaluation import best
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.main import Run
from coppice.scheduler.telemetry import health
from coppice.wire import messages as wire
from coppice.wire import published
from coppice.wire.faults import DataFault
from coppice.wire.keys import RunKeys
from coppice.wire.published import Weights
from coppice.wire.service import Call, Service

QUESTIONS, UPDATES, HELD_OUT = 2, 2, 3
SETTINGS = SchedulerConfig(
    strategy="chain", judge="none", updates=UPDATES, questions_per_update=QUESTIONS,
    max_action_tokens=4, dispatch=DispatchConfig(heartbeat_s=600.0, dead_after_s=6000.0),
    evaluation=EvaluationConfig(questions=HELD_OUT),
)  # fmt: skip


class House:
    """A real run with stand-ins for an actor and a learner. held: evaluations of version 0 wait
    until it says so. loads: evaluations known at each load. last: the version after which the
    learner hangs. more: fields of the process."""

    last = UPDATES

    def __init__(
        self,
        folder: Path,
        model: Path,
        held: Callable[["House"], bool] = lambda house: False,
        version: int = 0,
        **more: Any,
    ):
        options = {"prompt": "tictactoe_compact", "opponents": {"random": 1.0}}
        place = "scheduler", str(folder), 0, str(model), "tictactoe", options
        process = SchedulerProcess(*place, "", "", 1, [], 16, SETTINGS)
        process = msgspec.structs.replace(process, **more)
        self.folder, self.run, self.held, self.trained = folder, Run(process), held, version
        self.loads: list[tuple[int, list[str]]] = []
        self.in_force = 0
        self.waiting: list[asyncio.Future[wire.Trained]] = []

    async def generate(self, request: wire.GenerateRequest, call: Call) -> wire.GenerateResult:
        while request.sampling.temperature == 0.0 and not self.in_force and self.held(self):
            await asyncio.sleep(0.001)
        one = np.ones(1, np.int32)
        sample = wire.Sample(65 * one, np.zeros(1, np.float32), self.in_force * one, "stop")
        return wire.GenerateResult([sample] * request.n, len(request.tokens), 0)

    async def load(self, request: wire.LoadRequest, call: Call) -> wire.LoadResult:
        evaluated = [name for _, name, _ in self.run.journal.evaluations()]
        self.loads.append((request.version, evaluated))
        self.in_force = request.version
        return wire.LoadResult(request.version, request.digest, 0.0)

    async def train(self, group: wire.TrainGroup, call: Call) -> wire.Trained:
        answer: asyncio.Future[wire.Trained] = asyncio.get_running_loop().create_future()
        self.waiting.append(answer)
        if len(self.waiting) == QUESTIONS and self.trained < self.last:
            self.trained += 1
            weights = publish(self.folder, self.trained)
            for one in self.waiting:
                one.set_result(wire.Trained(weights.version, weights.path, weights.digest, {}, []))
            self.waiting.clear()
        return await answer

    async def close(self, closed: wire.TreeClosed, call: Call) -> wire.Closed:
        return wire.Closed()

    async def live(self, until: Callable[[Any], bool] = lambda house: False) -> None:
        """The whole run, or its beginning: it is dropped as soon as ``until`` is true."""
        services = "generate", "load", "train", "close"
        keys = RunKeys(self.folder / "keys").mint("tests", services)
        endpoint = self.run.dispatcher.endpoint
        actor = Service("actor-0", {"generate": self.generate, "load": self.load}, 16)
        learner = Service("learner", {"train": self.train, "close": self.close}, 64)
        main = asyncio.create_task(self.run.main())
        running = (each.run(endpoint, keys, signals=False) for each in (actor, learner))
        workers = [asyncio.create_task(run) for run in running]
        try:
            async with asyncio.timeout(300):
                while not main.done() and not until(self):
                    await asyncio.sleep(0.001)
                if main.done():
                    main.result()
        finally:
            for task in (main, *workers):
                task.cancel()
            await asyncio.gather(main, *workers, return_exceptions=True)
            await self.run.close()


def journal_of(folder: Path) -> Journal:
    return Journal(folder / "journal.sqlite", readonly=True)


def publish(folder: Path, version: int) -> Weights:
    """A version's folder, and the word of it."""
    path = folder / "weights" / f"v{version:06d}"
    path.mkdir(parents=True, exist_ok=True)
    published.Manifest(version, "full", "digest").write(path)
    weights = Weights(version, str(path), "digest")
    (folder / "learner.json").write_bytes(msgspec.json.encode(weights))
    return weights


def check(folder: Path) -> None:
    """All is evaluated by the version that the result names, and every tree was trained once."""
    journal = journal_of(folder)
    evaluated = [(version, name) for version, name, _ in journal.evaluations()]
    assert evaluated == [(0, "start"), (UPDATES, "end")]
    examined = journal.trees("split='heldout' AND status='closed'")
    for row in examined:
        nodes = journal.tree(row).nodes.values()
        sampled = [set(node.versions.tolist()) for node in nodes if node.versions is not None]
        assert sampled == [{row.version}] * len(sampled) != []
    assert sorted(row.version for row in examined) == [0] * HELD_OUT + [UPDATES] * HELD_OUT
    rows = journal.trees("split='train'")
    assert [row.position for row in rows] == list(range(QUESTIONS * UPDATES))
    groups = [journal.groups(row.id) for row in rows]
    assert sorted([version for _, version in each] for each in groups) == [[1], [1], [2], [2]]


def checkpoint(folder: Path, version: int, trained: Any) -> None:
    """A checkpoint that holds the groups ``trained``."""
    path = folder / "checkpoints" / f"v{version:06d}" / "state.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode({"version": version, "trained": trained}))


async def test_the_first_evaluation_beside_an_update_is_of_v0(tmp_path: Path, llama: Path) -> None:
    grown: list[int] = []
    ended = tmp_path / "summary.json"
    ended.write_text("{}")  # of an end with fewer updates

    def held(house: House) -> bool:
        if house.run.stream.version:
            assert not ended.exists()
            grown.append(len(house.run.journal.trees("split='train'")))
        return not house.run.stream.version  # until the scheduler knows of version 1

    house = House(tmp_path, llama, held)
    await house.live()
    check(tmp_path)
    assert grown[0] == QUESTIONS  # the trees of one update, no more
    assert ended.exists()
    report: Any = health.read(tmp_path)
    assert report.version == UPDATES  # though the run ended between two heartbeats
    assert house.loads == [(1, ["start"]), (2, ["start"])]


async def test_a_journal_older_than_the_checkpoint_is_refused(tmp_path: Path, llama: Path) -> None:
    dead = House(tmp_path, llama)
    await dead.live(until=lambda house: house.run.stream.version == 1)
    journal = journal_of(tmp_path)
    before = {row.id: journal.groups(row.id) for row in journal.trees()}
    lost = 1 + max(group for groups in before.values() for group, _ in groups)
    checkpoint(tmp_path, 1, [(0, 1, 1), (lost, lost + 1, 1)])
    resumed = House(tmp_path, llama, version=1)
    told = rf"lacks 2 groups \(first group {lost}\) .* version 1 .* restore its newest copy"
    with pytest.raises(DataFault, match=told):
        await resumed.live()
    assert resumed.waiting == []
    assert {row.id: journal.groups(row.id) for row in journal.trees()} == before


async def test_an_evaluation_that_is_overdue_is_made_at_a_resume(
    tmp_path: Path, llama: Path
) -> None:
    def settings(every: int) -> SchedulerConfig:
        evaluation = EvaluationConfig(questions=HELD_OUT, every=every)
        return msgspec.structs.replace(SETTINGS, updates=4, evaluation=evaluation)

    stopped = House(tmp_path, llama, scheduler=settings(0))
    stopped.last = 3
    await stopped.live(until=lambda house: house.run.stream.version == 3)
    checkpoint(tmp_path, 3, [(0, 3 * QUESTIONS - 1, 3)])
    resumed = House(tmp_path, llama, version=3, scheduler=settings(2))
    resumed.last = 4
    await resumed.live()
    evaluated = [(version, name) for version, name, _ in journal_of(tmp_path).evaluations()]
    assert evaluated == [(0, "start"), (3, "v3"), (4, "end")]


async def test_what_dies_in_the_last_evaluation_ends_the_run(tmp_path: Path, llama: Path) -> None:
    house = House(tmp_path, llama)
    evaluate = house.run.examination.evaluate

    async def broken(name: str) -> None:
        if name == "end":
            house.run.dispatcher.roster.failure = ZeroDivisionError("of the receive loop")
            await asyncio.sleep(600)
        await evaluate(name)

    house.run.examination.evaluate = broken  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ZeroDivisionError, match="of the receive loop"):
        await house.live()


async def test_an_evaluation_that_was_not_recorded_is_made_again(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(best, "keep", lambda *parts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await House(tmp_path, llama).live()
    (tmp_path / "learner.json").write_text("{}")  # of a learner without checkpoints
    await House(tmp_path, llama).live()
    assert [name for _, name, _ in journal_of(tmp_path).evaluations()] == ["start", "end"]
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [row["version"] for row in rows if "heldout/return" in row] == [0, UPDATES]
