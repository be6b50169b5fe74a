"""Samples that are begun before their turn, as of an agent's parallel calls. Invariant: one is
taken only for the very tokens from which it was begun."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from coppice.wire.messages import Sample

Drawn = tuple[list[Sample], int, int]
"""What ``Services.acted`` returns."""
How = tuple[Any, ...]
"""What a sample depends on: the tokens before it, the number of candidates, and what limits them.
"""


class Ahead:
    """The samples of one context that are begun and not taken."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, str], tuple[How, asyncio.Task[Drawn]]] = {}

    def begin(self, trajectory: int, call: str, how: How, work: Coroutine[Any, Any, Drawn]) -> None:
        """Start ``work`` for a call of a trajectory, unless it has been started."""
        if (trajectory, call) in self._begun:
            work.close()
            return
        task = asyncio.ensure_future(work)
        # it is raised where it is taken
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._begun[trajectory, call] = how, task

    def take(self, trajectory: int, how: How) -> asyncio.Task[Drawn] | None:
        """Return what was begun for a trajectory from just this, None if nothing was."""
        for place, (begun, task) in self._begun.items():
            if place[0] == trajectory and begun == how:
                del self._begun[place]
                return task
        return None

    def forget(self, trajectory: int | None = None) -> None:
        """Cancel what was begun for a trajectory, or for all."""
        for place in [place for place in self._begun if trajectory in (None, place[0])]:
            self._begun.pop(place)[1].cancel()
