"""Placement, breaker and backoff are pure: every clock and random number is given."""

import random

from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.dispatch.placement import Breaker, Load, backoff, choose

LOADS = st.lists(
    st.builds(Load, st.sampled_from("abcdef"), st.integers(0, 12), st.integers(1, 8)),
    max_size=6,
    unique_by=lambda load: load.worker,
)
NAMES = st.frozensets(st.sampled_from("abcdef"))


@given(LOADS, NAMES)
def test_no_full_worker_is_chosen(loads: list[Load], avoid: frozenset[str]) -> None:
    name = choose(loads, avoid)
    usable = [load for load in loads if load.worker not in avoid] or loads
    free = {load.worker: load for load in usable if load.in_flight < load.capacity}
    if name is None:
        assert not free
        return
    assert free[name].share == min(load.share for load in free.values())


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
