"""Every process of Coppice runs its coroutines on uvloop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Value = TypeVar("Value")


def run(main: Coroutine[Any, Any, Value]) -> Value:
    """Run ``main`` to its end on a fresh uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
