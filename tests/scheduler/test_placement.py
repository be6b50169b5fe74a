"""Placement, breaker and backoff are pure: every clock and random number is given."""

import random

from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.dispatch.calls import Breaker, Place
from coppice.scheduler.dispatch.dispatcher import backoff
from tests.services import loaded

WORKERS = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(0, 12), st.integers(1, 8)), max_size=6
)
NAMES = st.frozensets(st.sampled_from("abcdef"))


@given(WORKERS, NAMES)
def test_no_full_worker_is_chosen(sizes: dict[str, tuple[int, int]], avoid: frozenset[str]) -> None:
    workers = [loaded(name, *size) for name, size in sizes.items()]
    usable = [worker for worker in workers if worker.name not in avoid] or workers
    free = [worker for worker in usable if worker.has_room]
    chosen = Place().choose(workers, avoid)
    assert chosen is None if not free else chosen in free
    assert chosen is None or chosen.share == min(worker.share for worker in free)


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
