"""Concurrent work that succeeds or fails as a whole: the first fault is raised unchanged and
cancels the rest."""

import asyncio
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. Returns their results in order."""
    async with Beside() as beside:
        tasks = [beside.start(one) for one in work]
    return [task.result() for task in tasks]


class Beside:
    """``async with Beside() as beside: beside.start(work())``. Leaving the block waits for all
    started work and raises its first fault, which cancels the rest. An error of the block cancels
    all started work."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``work`` now."""
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> "Beside":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self._finished()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finished(self) -> None:
        done = 0
        while done < len(self._tasks):  # work may start more work
            done = len(self._tasks)
            await asyncio.gather(*self._tasks)
