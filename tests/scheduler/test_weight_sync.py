"""The newest weights reach every actor: those here, those that join meanwhile; one that cannot
prove them is sent away and may come again."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from coppice.scheduler.dispatch.residency import Residency
from coppice.scheduler.dispatch.weight_sync import WeightSync
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import LoadRequest, LoadResult
from coppice.wire.published import Weights
from coppice.wire.service import Call, Handler, Rejected
from tests.services import Bench, bench

ONE = Weights(1, "one", "a" * 64)


class Actor:
    """Takes weights. wrong: versions that it answers with a fault; proof: its engine's checksum;
    gate: what a load waits for."""

    def __init__(self, proof: str = "p", wrong: tuple[int, ...] = ()):
        self.proof, self.wrong = proof, wrong
        self.loads: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()

    def handlers(self) -> dict[str, Handler]:
        return {"load": self.load, "generate": self.load}

    async def load(self, request: LoadRequest, call: Call) -> LoadResult:
        self.loads.append(request.version)
        self.begun.set()
        await self.gate.wait()
        if request.version in self.wrong:
            raise InfrastructureFault("the file is cut short")
        return LoadResult(request.version, request.digest, 0.0, self.proof)


def made(table: Bench) -> WeightSync:
    """A synchronisation whose joining actors take the newest weights, as in the scheduler."""
    sync = WeightSync(table.dispatcher, Residency(), Counter())
    table.dispatcher.roster.on_join = sync.to
    return sync


async def test_who_fails_or_proves_other_weights_is_sent_away(tmp_path: Path) -> None:
    async with bench(tmp_path) as table:
        sync = made(table)
        actors = {"a": Actor(), "b": Actor("other"), "c": Actor(wrong=(1,)), "d": Actor()}
        actors |= {"e": Actor(""), "f": Actor("")}  # engines without a proof have no say
        for name, actor in actors.items():
            await table.work(name, actor.handlers())
        await sync.everywhere(ONE)
        assert {worker.name for worker in table.dispatcher.workers("generate")} == {*"adef"}
        assert sync.counts["failed_loads"] == 2
        assert sync.versions.proven == 1
        assert [actor.loads for actor in actors.values()] == [[1]] * 6


async def test_who_joins_while_the_others_still_load_is_compared_with_them(tmp_path: Path) -> None:
    async with bench(tmp_path) as table:
        sync, slow = made(table), Actor()
        for name, actor in (("a", slow), ("b", Actor())):
            await table.work(name, actor.handlers())
        slow.gate.clear()
        spreading = asyncio.create_task(sync.everywhere(ONE))
        await slow.begun.wait()
        late = Actor("other")
        joining = asyncio.create_task(table.work("late", late.handlers()))
        await late.begun.wait()
        slow.gate.set()
        await spreading
        while "late" not in table.tasks:
            await asyncio.sleep(0.001)
        with pytest.raises(Rejected):
            await asyncio.wait_for(table.tasks["late"], 10)
        joining.cancel()
        assert {worker.name for worker in table.dispatcher.workers()} == {"a", "b"}
