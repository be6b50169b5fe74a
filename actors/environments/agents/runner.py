"""What the process of an agent runs that is a Python function: ``python -m actors.environments.agents.runner MODULE:FUNCTION``.

It reads the task as JSON from its stdin and calls the function with it; a number that the function returns is the episode's reward. It imports nothing but
the agent, so that an episode begins at once.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from typing import Any

REWARD = b"\0reward "
"""Begins the line with which the process tells what the function returned."""


def main(run: str) -> None:
    """Call the function with the task of stdin, and tell the number that it returns. Raises ValueError for a number that is not finite."""
    sys.path.insert(0, os.getcwd())
    module, _, name = run.partition(":")
    task = json.loads(sys.stdin.read())
    result = getattr(importlib.import_module(module), name)(task)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if result is not None:
        reward = json.dumps(float(result), allow_nan=False)
        sys.stdout.flush()
        sys.stdout.buffer.write(b"\n" + REWARD + reward.encode() + b"\n")


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main(sys.argv[1])
