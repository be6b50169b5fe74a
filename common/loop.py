"""Every process of Coppice runs its coroutines on uvloop until they end or a signal comes."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from uvloop import run as run

T = TypeVar("T")


async def or_signal(work: asyncio.Task[Any]) -> bool:
    """Wait until ``work`` ends, or cancel it on SIGINT or SIGTERM. Return True if the work
    finished; False if a signal cancelled it."""
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    stop = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return True
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return False
    finally:
        stop.cancel()


async def until_signal(work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` returns; None if SIGINT or SIGTERM cancelled it."""
    task = asyncio.create_task(work)
    return task.result() if await or_signal(task) else None
