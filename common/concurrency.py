"""Concurrent work that succeeds or fails as a whole."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def settle(future: asyncio.Future[Any] | Future[Any], outcome: Any) -> None:
    """Answer a future, or fail it with an exception, unless this was done before."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently; their results in order. The first fault cancels the rest."""
    async with TaskGroup() as group:
        tasks = [group.start(one) for one in work]
    return [task.result() for task in tasks]


class TaskGroup(contextlib.AbstractAsyncContextManager["TaskGroup"]):
    """``asyncio.TaskGroup``, but the first fault is raised unchanged, not in an ExceptionGroup."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            done = len(self._tasks) if error is not None else 0
            while done < len(self._tasks):  # work may start more work
                done = len(self._tasks)
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
