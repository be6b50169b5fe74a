"""The equipment of the simulation: its clock, its network, and a dispatcher on both."""

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from coppice.scheduler.dispatch.dispatcher import DispatchConfig, Dispatcher
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import RetrieveRequest, RetrieveResult
from tests.simulation.network import Network
from tests.simulation.peers import Manners, Retriever
from tests.simulation.virtual_time import Agenda, Stuck, VirtualLoop


def played(agenda: Agenda, work: Coroutine[Any, Any, Any]) -> Any:
    """Run ``work`` to its end on the virtual clock."""
    loop = VirtualLoop(agenda)
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()


def exhaust(agenda: Agenda) -> None:
    """Run all events."""
    while not agenda.empty:
        agenda.advance()


def connected(rng: random.Random) -> tuple[Agenda, Network, Dispatcher, Retriever]:
    """A dispatcher and a retriever on a network with a delay of 10 ms."""
    agenda = Agenda(deadline=1e5)
    network = Network(agenda, rng, lambda *event: None, slow=0.01, spikes=0.0)
    config = DispatchConfig(heartbeat_s=2.0, dead_after_s=20.0)
    dispatcher = Dispatcher(
        "simulated", None, config, router=network.bind(), clock=lambda: agenda.now
    )
    peer = Retriever(network, rng, "retriever", ["retrieve"], 1)
    peer.manners = Manners(seconds={"retrieve": 1.0})
    return agenda, network, dispatcher, peer


def test_hours_of_sleep_take_no_time_and_wake_in_order() -> None:
    agenda, woken = Agenda(deadline=1e5), []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((seconds, agenda.now))

    async def work() -> None:
        agenda.at(5000.0, lambda: woken.append((0.0, agenda.now)))
        await asyncio.gather(*(sleeper(seconds) for seconds in (9000.0, 3600.0, 0.5)))

    start = time.monotonic()
    played(agenda, work())
    assert woken == [(0.5, 0.5), (3600.0, 3600.0), (0.0, 5000.0), (9000.0, 9000.0)]
    assert time.monotonic() - start < 60


def test_a_wait_for_nothing_is_found_instead_of_hanging() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing will ever happen"):
        played(Agenda(), forever())


def test_messages_of_one_connection_keep_their_order_and_a_cut_loses_those_under_way() -> None:
    agenda, arrived = Agenda(deadline=100.0), []
    network = Network(agenda, random.Random(0), lambda *event: None, slow=1.0, spikes=0.5)
    socket = network.bind()
    connection = network.connect("peer", b"peer", lambda frames: arrived.append(frames[0]))
    for number in range(20):
        socket.send([b"peer", b"%d" % number])
    exhaust(agenda)
    assert arrived == [b"%d" % number for number in range(20)]
    socket.send([b"peer", b"lost"])
    network.cut(connection, 5.0)
    socket.send([b"peer", b"lost too"])
    exhaust(agenda)
    assert len(arrived) == 20


@pytest.mark.parametrize(
    "answered", [False, True], ids=["the request is lost", "the answer is lost"]
)
def test_a_call_that_was_lost_with_the_connection_is_made_again(answered: bool) -> None:
    agenda, network, dispatcher, peer = connected(random.Random(1))

    async def work() -> RetrieveResult:
        await dispatcher.start()
        peer.start()
        await dispatcher.wait_for("retrieve", 1, 60.0)
        call = asyncio.create_task(
            dispatcher.call("retrieve", RetrieveRequest(["q"], 1), deadline=1e4)
        )
        await asyncio.sleep(0.0)
        if answered:
            while not peer.answers:
                await asyncio.sleep(0.001)
        network.cut(peer.connection, 0.5)
        return await call

    answer = played(agenda, work())
    assert len(answer.passages) == 1
    assert dispatcher.counters["lost_calls"] == 1
    assert agenda.now < 30.0


def test_the_death_of_a_worker_ends_its_calls() -> None:
    agenda, _, dispatcher, peer = connected(random.Random(2))

    async def work() -> None:
        await dispatcher.start()
        peer.start()
        await dispatcher.wait_for("retrieve", 1, 60.0)
        call = asyncio.create_task(
            dispatcher.call("retrieve", RetrieveRequest(["q"], 1), deadline=100.0)
        )
        await asyncio.sleep(0.0)
        peer.die()
        with pytest.raises(InfrastructureFault, match="took over 100"):
            await call

    played(agenda, work())
    assert dispatcher.counters["dead_workers"] == 1
    assert dispatcher.open_calls() == []
