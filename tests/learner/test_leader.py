"""Rank 0 behind a real dispatcher: each group is answered once, by the update that holds it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from coppice.learner.main import Leader
from coppice.learner.model import checkpoint
from coppice.learner.update.batches import Inbox
from coppice.learner.update.trainer import Batch
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Trained, TrainGroup, TreeClosed
from tests.services import bench
from tests.updates import groups, newest, trainer

LONG_S = 60.0


@asynccontextmanager
async def learner(
    model: Path, run: Path, **settings: Any
) -> AsyncIterator[tuple[Leader, Dispatcher]]:
    """A leader at work as the service ``learner``; stopped and checkpointed at the end."""
    made = trainer(model, run, **settings)
    leader = Leader(made, run, Inbox(3, {}))
    async with bench(run) as here:
        await here.work("learner", {"train": leader.train, "close": leader.close}, capacity=64)
        working = asyncio.create_task(leader.work())
        try:
            yield leader, here.dispatcher
        finally:
            leader.stop()
            await working


def send(dispatcher: Dispatcher, some: list[TrainGroup]) -> list[asyncio.Task[Trained]]:
    return [asyncio.create_task(dispatcher.call("train", group, deadline=LONG_S)) for group in some]


async def close(dispatcher: Dispatcher, some: list[TrainGroup]) -> None:
    for group in some:
        await dispatcher.call("close", TreeClosed(group.tree, [group.id]), deadline=LONG_S)


async def trained(dispatcher: Dispatcher, some: list[TrainGroup]) -> list[Trained]:
    calls = send(dispatcher, some)
    await close(dispatcher, some)
    return await asyncio.gather(*calls)


async def test_a_group_sent_again_is_answered_by_its_update(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path) as (leader, dispatcher):
        started, go_on = threading.Event(), threading.Event()
        update = leader.trainer.update

        def held(batch: Batch) -> dict[str, float]:
            started.set()
            assert go_on.wait(LONG_S)
            return update(batch)

        leader.trainer.update = held
        some, _ = groups(0)
        calls = send(dispatcher, some)
        await close(dispatcher, some)
        assert await asyncio.to_thread(started.wait, LONG_S)
        again = send(dispatcher, some[:1])
        # it passes behind the group: that has arrived
        await dispatcher.call("close", TreeClosed(99, []), deadline=LONG_S)
        assert not again[0].done()
        go_on.set()
        assert [answer.version for answer in await asyncio.gather(*calls, *again)] == [1] * 4


async def test_a_resumed_learner_knows_versions_and_metrics(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path, checkpoint_every=10) as (leader, dispatcher):
        told: list[Trained] = []
        for version in (1, 2):
            told += (await trained(dispatcher, groups(version)[0]))[:1]
        assert newest(tmp_path) is None  # it is written when the learner stops
        assert leader.stats()["updates"] == 2 and leader.stats()["learner/forwarded_tokens"] > 0
    resumed = trainer(llama, tmp_path)
    state, _ = checkpoint.restore_newest(resumed, tmp_path)
    assert set(state.groups().values()) == {1, 2}
    leader = Leader(resumed, tmp_path, Inbox(3, state.groups()), records=state.records)
    for version, answer in zip((1, 2), told, strict=True):
        again = await leader.train(groups(version)[0][0], cast(Any, None))
        assert again.version == version
        # The record was written with the checkpoint, which it therefore does not time.
        assert again.metrics == {
            name: v for name, v in answer.metrics.items() if name != "time/checkpoint"
        }


async def test_a_group_without_its_ancestors_is_refused(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path) as (_, dispatcher):
        some, _ = groups(0)
        orphan = msgspec.structs.replace(some[0], nodes=some[0].nodes[1:])
        with pytest.raises(InfrastructureFault, match="resent"):
            await dispatcher.call("train", orphan, deadline=LONG_S)
        assert {answer.version for answer in await trained(dispatcher, some)} == {1}
