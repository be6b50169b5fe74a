"""Servers that join, leave, die and start anew behind a router during a run, in every order with
the updates of weights."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coppice.actors.engines import served
from coppice.actors.engines.sglang import SGLangEngine
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, Sampling
from tests.sglang_cpu.scripted import (
    REQUEST,
    STEPS,
    WAIT_S,
    Router,
    Server,
    adapter,
    engine,
    giving,
    in_memory,
    version,
)


class Fleet:
    def __init__(self, folder: Path):
        self.folder, self.router = folder, Router()
        self.servers: list[Server] = []
        self.engine: SGLangEngine = None  # pyright: ignore[reportAttributeAccessIssue]

    async def opened(self, count: int = 2) -> None:
        await self.router.start()
        for _ in range(count):
            await self.joins(Server())
        self.engine = engine(self.folder, self.router.url)
        await self.engine.start()

    async def joins(self, server: Server) -> Server:
        await server.start()
        self.servers.append(server)
        self.router.add(server)
        return server

    async def load(self, number: int) -> None:
        await self.engine.load(version(self.folder, number))

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.01)

    async def with_all(self, count: int) -> None:
        await self.until(lambda: len(self.engine.way.servers) == count)

    async def sampled(self, *expected: int) -> None:
        """All of some samples are of these weights, and bear their numbers as versions."""
        request = GenerateRequest(REQUEST.tokens, 4, REQUEST.sampling)
        results = [await self.engine.generate(request) for _ in range(2)]
        samples = [sample for result in results for sample in result.samples]
        found = {(int(sample.tokens[0]), int(sample.versions[0])) for sample in samples}
        assert found == {(number, number) for number in expected}

    async def closed(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        for site in (*self.servers, self.router):
            await site.stop()


@pytest_asyncio.fixture
async def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(served, "LOOK_S", 0.05)
    made = Fleet(tmp_path)
    yield made
    await made.closed()


@pytest_asyncio.fixture
async def fleet(bare: Fleet) -> Fleet:
    """Two servers that hold version 1."""
    await bare.opened()
    await bare.load(1)
    return bare


async def test_a_server_that_joins_gives_no_sample_before_it_has_the_version(fleet: Fleet) -> None:
    third = Server()
    reached, release = third.hold("/update_weights_from_disk")
    await fleet.joins(third)
    fleet.router.newest = True  # everything goes to the one that is not ready
    there = asyncio.create_task(fleet.sampled(1))
    await asyncio.wait_for(reached.wait(), WAIT_S)
    fleet.router.newest = False
    assert not there.done()
    release.set()
    await asyncio.wait_for(there, WAIT_S)
    await fleet.with_all(3)
    assert third.weights == 1 and third.named == fleet.servers[0].named
    assert third.bodies["/update_weights_from_disk"]["flush_cache"]
    assert fleet.servers[0].calls.count("/pause_generation") == 1  # for version 1 alone


@pytest.mark.second
async def test_a_sample_of_weights_from_elsewhere_is_not_taken(fleet: Fleet) -> None:
    fleet.servers[0].hold("/weights_checker")  # so that it is not brought back
    for name in ("1", "1@another", "7", "default"):
        fleet.servers[0].named, fleet.servers[0].weights = name, 99
        await fleet.sampled(1)
    assert fleet.engine.stats()["asked_again"] >= 4


async def test_a_server_that_joins_during_an_update_gets_the_new_version(fleet: Fleet) -> None:
    reached, release = fleet.servers[1].hold("/update_weights_from_disk")
    update = asyncio.create_task(fleet.load(2))
    await reached.wait()
    third = await fleet.joins(Server())
    fleet.router.newest = True
    asking = asyncio.create_task(fleet.sampled(2))
    release.set()
    await update
    await asking
    await fleet.with_all(3)
    assert third.weights == 2


async def test_a_server_that_starts_anew_is_brought_back_and_one_may_leave(fleet: Fleet) -> None:
    first = fleet.servers[0]
    first.anew()
    await fleet.sampled(1)
    await fleet.until(lambda: first.weights == 1)
    await fleet.with_all(2)
    fleet.router.remove(first)
    await fleet.with_all(1)
    first.calls.clear()
    await fleet.load(2)
    await fleet.sampled(2)
    assert first.weights == 1 and not first.calls
    await fleet.until(lambda: fleet.engine.stats()["kv_capacity_tokens"] == 1000)


@pytest.mark.second
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("ends", ["fails", "dies"])
async def test_a_server_may_fail_or_die_in_an_update(fleet: Fleet, step: str, ends: str) -> None:
    first, second = fleet.servers
    if ends == "fails":
        first.fails[step] = 400
    else:
        first.dies.add(step)
    await fleet.load(2)
    assert second.weights == 2 and second.going.is_set()
    if ends == "dies":
        await first.gone
        await fleet.sampled(2)
        first.anew()
        await first.start()
    await fleet.sampled(2)
    await fleet.with_all(2)
    assert first.weights == 2 and first.named == second.named and first.going.is_set()
    assert not fleet.router.removed
    await fleet.load(3)
    await fleet.sampled(3)


@pytest.mark.parametrize(
    ("number", "tensors", "said"),
    [(99, "b", "serves another model"), (99, "a", "holds other weights")],
)
async def test_before_the_first_update_a_server_of_other_weights_is_taken_out_of_the_router(
    bare: Fleet, caplog: pytest.LogCaptureFixture, number: int, tensors: str, said: str
) -> None:
    await bare.opened()
    good = await bare.joins(Server())
    await bare.with_all(3)
    assert good.named == bare.servers[0].named
    other = await bare.joins(Server(number, tensors))
    bare.router.newest = True
    await bare.sampled(0)
    assert bare.router.removed == [other.url]
    assert "/pause_generation" not in other.calls and other.weights == number
    assert said in caplog.text and "was taken out of the router" in caplog.text


@pytest.mark.second
async def test_a_run_waits_for_the_first_server_behind_its_router(bare: Fleet) -> None:
    starting = asyncio.create_task(bare.opened(0))
    await bare.until(lambda: bare.engine is not None)
    await bare.joins(Server())
    await asyncio.wait_for(starting, WAIT_S)
    await bare.sampled(0)


async def test_requests_outlast_a_router_that_starts_anew(fleet: Fleet) -> None:
    await fleet.router.stop()
    asking = asyncio.create_task(fleet.sampled(1))
    await fleet.until(lambda: fleet.engine.stats().get("asked_again", 0) >= 4)
    await fleet.router.start()
    await asking


@pytest.mark.second
async def test_what_a_dying_server_computed_is_asked_again_elsewhere(fleet: Fleet) -> None:
    first = fleet.servers[0]
    first.going.clear()
    asking = asyncio.create_task(fleet.sampled(1))
    await fleet.until(lambda: "/generate" in first.calls)
    await first.stop()
    await asking
    await fleet.with_all(1)


async def test_an_adapter_reaches_a_server_that_joins(fleet: Fleet) -> None:
    await fleet.engine.load(adapter(fleet.folder, 2))
    third = await fleet.joins(Server())
    fleet.router.newest = True
    for number in (2, 3):
        result = await fleet.engine.generate(REQUEST)
        assert result.samples[0].versions.tolist() == [number]
        await fleet.with_all(3)
        assert third.adapters == fleet.servers[0].adapters and third.weights == 1
        third.fails["/load_lora_adapter"] = 400
        if number == 2:
            await fleet.engine.load(adapter(fleet.folder, 3))
    assert not fleet.router.removed


@pytest.mark.second
async def test_a_version_that_can_no_longer_be_had_leaves_a_joining_server_out_until_the_next(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def moved(server: Server) -> None:
        server.weights = 2

    for server in fleet.servers:  # a scripted one takes part in no broadcast
        server.at["/end_weight_update"] = functools.partial(moved, server)
    with giving() as giver:
        await fleet.engine.load(in_memory(fleet.folder, giver, 2))
        for number in (3, 4):
            in_memory(fleet.folder, giver, number)
        third = await fleet.joins(Server())
        await fleet.until(lambda: "stays out until another version" in caplog.text)
    assert not fleet.router.removed and third.weights == 0 and third.going.is_set()
    for server in fleet.servers:
        server.at.clear()
    await fleet.load(3)
    await fleet.with_all(3)
    assert third.weights == 3


@pytest.mark.second
async def test_weights_reach_all_servers_side_by_side(fleet: Fleet) -> None:
    together = asyncio.Barrier(2)
    for server in fleet.servers:
        server.at["/update_weights_from_disk"] = together.wait
    await asyncio.wait_for(fleet.load(2), WAIT_S / 2)
    await fleet.sampled(2)


async def test_behind_a_router_cut_distributions_are_refused(fleet: Fleet) -> None:
    cut = GenerateRequest(REQUEST.tokens, 1, Sampling(4, top_p=0.5))
    with pytest.raises(DataFault, match="top_p = 1"):
        await fleet.engine.generate(cut)
