"""What survives a full collection is spared the next ones, and cycles among it are freed in the
end."""

import gc
import weakref

import pytest

from coppice.scheduler.garbage import THAW_S, YOUNG, sparing


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.second
def test_survivors_are_not_looked_at_again_until_the_thaw() -> None:
    now, before = 0.0, gc.get_freeze_count()
    cycle = Cycle()
    gone = weakref.ref(cycle)
    with sparing(lambda: now):
        gc.collect(1)
        assert gc.get_freeze_count() == before
        gc.collect()
        assert gc.get_freeze_count() > before
        del cycle
        gc.collect()
        assert gone() is not None
        now = THAW_S + 1
        gc.collect()
        assert gone() is None


@pytest.mark.second
def test_a_context_spares_and_leaves_the_collector_as_it_was() -> None:
    usual, callbacks, frozen = gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()
    with sparing():
        assert gc.get_threshold()[0] == YOUNG
        gc.collect()
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.callbacks, gc.get_freeze_count()) == (usual, callbacks, 0)
