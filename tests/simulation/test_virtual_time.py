"""The equipment of the simulation: its clock and its network."""

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.simulation.network import Network
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
