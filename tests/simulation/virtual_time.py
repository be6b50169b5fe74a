"""An event loop whose time is virtual: when nothing is ready, the clock jumps to the next timer of
the loop or event of the agenda. A crash abandons the loop, and the agenda goes on with the next."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Stuck(Exception):
    """The run cannot end: nothing will ever happen again, or the virtual deadline has passed."""


class Agenda:
    """The virtual clock and the events of everything outside the scheduler. turns: of the loops."""

    def __init__(self, deadline: float = math.inf, turns: int = 0):
        self.now, self.deadline, self.turns = 0.0, deadline, turns
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Events of one moment run in the order in which they were added."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), event))

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay, event)

    def advance(self, timer: float = math.inf) -> bool:
        """Run the next event, or move the clock to ``timer`` if that comes first. Returns whether it
        was an event."""
        event = self._events[0][0] if self._events else math.inf
        moment = min(event, timer)
        if math.isinf(moment):
            raise Stuck("nothing will ever happen again")
        if moment > self.deadline:
            raise Stuck(f"not over after {self.deadline:.0f} s")
        self.now = max(self.now, moment)
        if event > timer:
            return False
        heapq.heappop(self._events)[2]()
        return True


class VirtualLoop(asyncio.BaseEventLoop):
    """Work for a thread is done at once, because threads have no order, and is told after ``pause``
    seconds. at_rest: called when nothing is ready, before the clock moves."""

    def __init__(
        self,
        agenda: Agenda,
        pause: Callable[[], float] = lambda: 0.0,
        at_rest: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.agenda, self.pause, self.at_rest = agenda, pause, at_rest
        # the base class asks its selector to wait, and here waiting is a jump of the clock
        self._selector = self
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self.agenda.now

    def select(self, timeout: float | None) -> list[Any]:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # pyright: ignore
        self.agenda.turns -= 1
        if not self.agenda.turns:
            raise Stuck("it turns without an end")
        event = True
        while timeout != 0 and event:
            self.at_rest()
            event = self.agenda.advance(scheduled[0].when() if scheduled else math.inf)
            timeout = 0 if self._ready else None  # pyright: ignore[reportAttributeAccessIssue]
        return []

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future, result = self.create_future(), func(*args)

        def told() -> None:
            if not self.is_closed() and not future.done():
                future.set_result(result)

        self.agenda.after(self.pause(), told)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no descriptors."""

    def _write_to_self(self) -> None:
        """There is no other thread that could wake the loop."""
