"""Calls expire in time, and many of them by one timer."""

import asyncio
import random

from coppice.scheduler.dispatch.calls import LEAST_LOADED, PARTS, Deadlines, Pending
from tests.simulation.virtual_time import Agenda, VirtualLoop


def test_a_call_expires_never_before_its_time_and_at_most_one_part_of_it_later() -> None:
    agenda, rng = Agenda(deadline=1e6), random.Random(0)
    due, ended = dict[Pending, tuple[float, float]](), dict[Pending, float]()

    async def work() -> None:
        deadlines = Deadlines(lambda pending, _: ended.update({pending: agenda.now}))
        for _ in range(500):
            pending = Pending("s", [], dict, 0.0, LEAST_LOADED, None, "", 0.0)
            seconds = 10 ** rng.uniform(-2, 4)
            moment = deadlines.add(pending, seconds)
            if rng.random() < 0.3:
                deadlines.discard(pending, moment)
                deadlines.discard(pending, moment)  # its time may be over already
            else:
                due[pending] = agenda.now, seconds
            await asyncio.sleep(rng.random())
        assert set(deadlines) == due.keys() - ended.keys()
        await asyncio.sleep(20_000)

    loop = VirtualLoop(agenda)
    loop.run_until_complete(work())
    loop.close()
    assert ended.keys() == due.keys()
    for pending, (begun, seconds) in due.items():
        assert begun + seconds - 1e-6 <= ended[pending] <= begun + seconds * (1 + 1 / PARTS) + 1e-3
