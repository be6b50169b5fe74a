"""Calls expire in time, and many of them by one timer."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from coppice.scheduler.dispatch.calls import Pending
from coppice.scheduler.dispatch.deadlines import PARTS, Deadlines


class Clock:
    """An event loop's clock and timers, which a test moves. timers: the open ones, by moment."""

    def __init__(self) -> None:
        self.now, self.made = 1234.5, 0
        self.timers: dict[float, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def time(self) -> float:
        return self.now

    def call_at(self, moment: float, callback: Callable[..., None], *arguments: Any) -> Any:
        self.made += 1
        self.timers[moment] = callback, arguments
        clock = self

        class Handle:
            def cancel(self) -> None:
                del clock.timers[moment]

        return Handle()

    def go(self) -> None:
        """Move to the next timer."""
        self.now = min(self.timers)
        callback, arguments = self.timers.pop(self.now)
        callback(*arguments)


def _pendings(count: int) -> list[Pending]:
    async def made() -> list[Pending]:
        return [Pending("s", [], dict, 0.0, None, None, "", 0.0) for _ in range(count)]

    return asyncio.run(made())


def test_a_call_expires_never_before_its_time_and_at_most_one_part_of_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, pendings, ended = random.Random(0), _pendings(500), dict[Pending, float]()
    clock = Clock()
    monkeypatch.setattr(
        "coppice.scheduler.dispatch.deadlines.asyncio.get_running_loop", lambda: clock
    )
    deadlines = Deadlines(lambda pending, _: ended.update({pending: clock.now}))
    asked = dict[Pending, tuple[float, float]]()
    for pending in pendings:
        seconds = 10 ** rng.uniform(-2, 4)
        asked[pending] = clock.now, seconds
        moment = deadlines.add(pending, seconds)
        if rng.random() < 0.3:
            deadlines.discard(pending, moment)
            deadlines.discard(pending, moment)  # its time may be over already
            del asked[pending]
        clock.now += rng.random()
        while clock.timers and min(clock.timers) <= clock.now:
            now = clock.now
            clock.go()
            clock.now = now
    while clock.timers:
        clock.go()
    assert set(ended) == set(asked)
    for pending, (begun, seconds) in asked.items():
        assert ended[pending] >= begun + seconds - 1e-9
        # the clock moves by up to a second here
        assert ended[pending] <= begun + seconds * (1 + 1 / PARTS) + 1.0
