"""The calls without an outcome by the moment of their deadline: one timer for many calls. With
20,000 open calls, a timer each in the event loop's heap costs more than all else of a call."""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator

from coppice.scheduler.dispatch.calls import Pending

PARTS = 64
"""A call may expire later than asked, by at most this part of its time."""


class Deadlines:
    """Calls ``expire`` for each call whose time is over and that was not discarded before."""

    def __init__(self, expire: Callable[[Pending, float], None]):
        self._expire = expire
        self._due: dict[float, tuple[dict[Pending, float], asyncio.TimerHandle]] = {}

    def __iter__(self) -> Iterator[Pending]:
        """The calls, of which none may come or go meanwhile."""
        return itertools.chain.from_iterable(calls for calls, _ in self._due.values())

    def add(self, pending: Pending, seconds: float) -> float:
        """Let a call expire in ``seconds``, and return the moment that ``discard`` needs."""
        loop = asyncio.get_running_loop()
        step = 2.0 ** math.floor(math.log2(max(seconds, 1e-3))) / PARTS
        moment = math.ceil((loop.time() + seconds) / step) * step
        if (due := self._due.get(moment)) is None:
            due = self._due[moment] = {}, loop.call_at(moment, self._reach, moment)
        due[0][pending] = seconds
        return moment

    def discard(self, pending: Pending, moment: float) -> None:
        """The call has an outcome."""
        if (due := self._due.get(moment)) is not None:
            due[0].pop(pending, None)
            if not due[0]:
                due[1].cancel()
                del self._due[moment]

    def _reach(self, moment: float) -> None:
        for pending, seconds in self._due.pop(moment)[0].items():
            self._expire(pending, seconds)
