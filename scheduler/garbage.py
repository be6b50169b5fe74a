"""Keep the garbage collector from holding up the event loop: it looks rarely, and what has survived
a full collection is spared the next ones."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

THAW_S = 900.0
"""The longest time, in seconds, between two collections that look at every object. Between them,
cycles among the spared objects keep their memory."""
YOUNG = 50_000
"""Objects that may be made before the collector looks at them: most of them, such as those of an
open call, are gone by then. With 20,000 open calls and Python's default of 700, looking at each of
their objects takes a third of a call's processor time."""


@contextlib.contextmanager
def sparing(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Collect this process's garbage rarely inside the context, and spare what survives: thousands
    of trees have a million objects."""
    usual, thawed = gc.get_threshold(), clock()

    def spare(phase: str, info: dict[str, int]) -> None:
        nonlocal thawed
        if info["generation"] == 2 and phase == "start" and clock() - thawed > THAW_S:
            gc.unfreeze()
            thawed = clock()
        elif info["generation"] == 2 and phase == "stop":
            gc.freeze()

    gc.callbacks.append(spare)
    gc.set_threshold(YOUNG, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(spare)
        gc.unfreeze()
