"""Rank 0 behind a real dispatcher: each group is answered once, by the update that holds it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from coppice.actors.engines import weights
from coppice.common.frontier import Frontier
from coppice.learner.main import Leader
from coppice.learner.model import checkpoint
from coppice.learner.model.publish import Published
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


async def test_every_group_is_answered_with_its_version(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path) as (leader, dispatcher):
        for version in (1, 2):
            answers = await trained(dispatcher, groups(version)[0])
            assert [answer.version for answer in answers] == [version] * 3
            assert answers[0].metrics["learner/groups"] == 3
            proven = weights.verified(Path(answers[0].path), answers[0].digest)
            assert proven.kind == "lora"
            told = (tmp_path / "learner.json").read_bytes()
            published = Published(version, answers[0].path, answers[0].digest)
            assert msgspec.json.decode(told, type=Published) == published
        assert leader.stats()["updates"] == 2
        assert leader.stats()["learner/forwarded_tokens"] > 0


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


async def test_a_trained_group_is_answered_at_once(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path, checkpoint_every=2) as (_, dispatcher):
        for version, saved in ((1, False), (2, True)):
            some, _ = groups(version)
            await trained(dispatcher, some)
            assert (newest(tmp_path) is not None) == saved
            (again,) = await asyncio.gather(*send(dispatcher, some[:1]))
            assert again.version == version
        first, _ = groups(1)
        (late,) = await asyncio.gather(*send(dispatcher, first[:1]))
        assert (late.version, late.metrics["learner/groups"]) == (1, 3)
        assert late.path.endswith("v000001")


async def test_a_resumed_learner_knows_versions_and_metrics(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path, checkpoint_every=2) as (_, dispatcher):
        told: list[Trained] = []
        for version in (1, 2):
            told += (await trained(dispatcher, groups(version)[0]))[:1]
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


async def test_a_new_scheduler_reads_what_no_checkpoint_holds(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path, checkpoint_every=2) as (_, dispatcher):
        for version, known in ((1, {1}), (2, {1, 2}), (3, {3})):
            some, _ = groups(version)
            await trained(dispatcher, some)
            announced = msgspec.json.decode((tmp_path / "learner.json").read_bytes(), type=Frontier)
            assert (announced.version, set(announced.groups().values())) == (version, known)
            assert {group.id for group in some} <= set(announced.groups())


async def test_a_group_without_its_ancestors_is_refused(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path) as (_, dispatcher):
        some, _ = groups(0)
        orphan = msgspec.structs.replace(some[0], nodes=some[0].nodes[1:])
        with pytest.raises(InfrastructureFault, match="resent"):
            await dispatcher.call("train", orphan, deadline=LONG_S)
        assert {answer.version for answer in await trained(dispatcher, some)} == {1}


async def test_a_tree_without_groups_counts_as_a_question(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path) as (_, dispatcher):
        some, _ = groups(0)
        await dispatcher.call("close", TreeClosed(77, []), deadline=LONG_S)
        (first, _) = await trained(dispatcher, some[:2])
        assert (first.metrics["learner/questions"], first.metrics["learner/groups"]) == (3, 2)


async def test_stopping_leaves_a_checkpoint_of_the_newest(tmp_path: Path, llama: Path) -> None:
    async with learner(llama, tmp_path, checkpoint_every=10) as (_, dispatcher):
        some, _ = groups(0)
        await trained(dispatcher, some)
        assert newest(tmp_path) is None
    state, _ = checkpoint.restore_newest(trainer(llama, tmp_path), tmp_path)
    assert (state.version, state.groups()) == (1, {group.id: 1 for group in some})
