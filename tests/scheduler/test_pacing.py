"""The bound of scheduler/pacing.py, under any order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.pacing import Pacing


class Simulation:
    """Trees that close in any order, batches cut as the learner cuts them."""

    def __init__(self, questions: int, staleness: int, updates: int):
        self.pacing = Pacing(questions, staleness, updates)
        self.growing: list[int] = []
        self.closed: list[int] = []
        self.trained = 0
        self.worst = 0

    def admit(self) -> None:
        while self.pacing.may_start():
            self.pacing.start()
            self.growing.append(self.pacing.version)

    def close(self, index: int) -> None:
        self.closed.append(self.growing.pop(index % len(self.growing)))

    def update(self) -> None:
        q = self.pacing.questions
        if len(self.closed) >= q:
            batch, self.closed = self.closed[:q], self.closed[q:]
            self.worst = max(self.worst, *(self.pacing.version - at for at in batch))
            self.trained += q
            self.pacing.trained(self.pacing.version + 1)


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 50), max_size=80))
@settings(deadline=None)
def test_admitted_but_untrained_trees_never_exceed_the_bound_and_no_run_is_stuck(
    questions: int, staleness: int, order: list[int]
) -> None:
    sim = Simulation(questions, staleness, updates=5)
    for event in order:
        sim.admit()
        assert sim.pacing.admitted - sim.trained <= (staleness + 1) * questions
        if sim.growing:
            sim.close(event)
        sim.update()
    for _ in range(100):
        sim.admit()
        if sim.growing:
            sim.close(0)
        sim.update()
    assert sim.pacing.finished
    assert sim.trained == 5 * questions
    assert not sim.growing
    assert not sim.closed


@given(st.integers(1, 4), st.integers(0, 3))
def test_consumed_in_admission_order_staleness_stays_within_the_bound(questions: int, staleness: int) -> None:
    sim = Simulation(questions, staleness, updates=8)
    while not sim.pacing.finished:
        sim.admit()
        sim.close(0)
        sim.update()
    assert sim.worst <= staleness


def test_staleness_zero_is_synchronous() -> None:
    sim = Simulation(3, 0, updates=2)
    sim.admit()
    assert len(sim.growing) == 3
    for _ in range(3):
        assert sim.pacing.version == 0
        sim.close(0)
        sim.admit()
    sim.update()
    sim.admit()
    assert sim.growing == [1, 1, 1]


def test_a_withdrawn_tree_makes_room_and_an_overtaken_one_is_counted() -> None:
    pacing = Pacing(1, 0, 3)
    pacing.start()
    assert not pacing.may_start()
    pacing.withdraw()
    assert pacing.may_start()
    pacing.trained(2)
    pacing.close(admitted_at=0)
    assert pacing.over_stale == 1


def test_starting_beyond_the_bound_is_an_error() -> None:
    pacing = Pacing(1, 0, 3)
    pacing.start()
    with pytest.raises(RuntimeError, match="bound"):
        pacing.start()
