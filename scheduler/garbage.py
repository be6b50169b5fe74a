"""Keep the garbage collector from holding up the event loop: it looks rarely, and what has survived
a full collection is spared the next ones."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

THAW_S = 3600.0
"""The longest time, in seconds, between two collections that look at every object."""
MORE, ROOM = 1.5, 100_000
"""Every object is also looked at as soon as more than ``MORE`` times the objects of the last such
collection, and ``ROOM``, are spared: otherwise what leaves cycles quickly would fill the memory."""
YOUNG = 50_000
"""Objects that may be made before the collector looks at them: most of them, such as those of an
open call, are gone by then. With 20,000 open calls and Python's default of 700, looking at each of
their objects takes a third of a call's processor time."""
RARELY = 100
"""The spared objects are counted again after this many times the time that counting them took,
which is nearly as long as collecting."""


class Survivors:
    """A callback for ``gc.callbacks``, which freezes what survives a full collection, since
    thousands of trees have a million objects. Only cycles among the spared ones wait until all are
    looked at again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._thawed = clock, clock()
        self._bound, self._count_at = 0.0, 0.0
        self._thawing = True  # this collection, the first one, looks at every object

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase != "stop" or info["generation"] != 2:
            return
        if not self._thawing and (self._clock() - self._thawed > THAW_S or self._too_many()):
            gc.unfreeze()
            self._thawed, self._thawing = self._clock(), True
            return
        gc.freeze()
        if self._thawing:
            self._bound, self._thawing = MORE * gc.get_freeze_count() + ROOM, False

    def _too_many(self) -> bool:
        if (began := time.perf_counter()) < self._count_at:
            return False
        count = gc.get_freeze_count()
        self._count_at = began + RARELY * (time.perf_counter() - began)
        return count > self._bound


@contextlib.contextmanager
def sparing() -> Iterator[None]:
    """Collect this process's garbage rarely, and spare what survives, until the end of the context."""
    survivors, usual = Survivors(), gc.get_threshold()
    gc.callbacks.append(survivors)
    gc.set_threshold(YOUNG, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(survivors)
        gc.unfreeze()
