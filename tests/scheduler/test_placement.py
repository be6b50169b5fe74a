"""Breaker, backoff and deadlines: every clock and random number is given."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.dispatch.calls import LEAST_LOADED, PARTS, Breaker, Deadlines, Pending
from coppice.scheduler.dispatch.dispatcher import backoff
from tests.simulation.virtual_time import Agenda, VirtualLoop


def test_a_breaker_rests_a_worker_after_failures_in_a_row_and_then_gives_it_one_chance() -> None:
    breaker = Breaker(threshold=3, rest_s=10.0)
    for ok in (False, False, True, False, False):
        breaker.record(ok, now=0.0)
    assert breaker.closed(0.0)
    breaker.record(False, now=1.0)
    assert not breaker.closed(10.9)
    assert breaker.closed(11.0)
    breaker.record(False, now=11.0)
    assert not breaker.closed(20.9)
    breaker.record(True, now=21.0)
    breaker.record(False, now=21.0)
    assert breaker.closed(21.0)


@given(st.integers(1, 10_000), st.integers())
def test_backoff_doubles_with_jitter_up_to_its_bound(attempt: int, seed: int) -> None:
    wait = backoff(attempt, random.Random(seed), base_s=0.05, most_s=5.0)
    ceiling = min(5.0, 0.05 * 2 ** min(attempt, 20))
    assert ceiling / 2 <= wait <= ceiling


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
