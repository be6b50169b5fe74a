"""The opponent plug-in: a class with one coroutine, served as ``player.<name>`` beside the judges."""

from typing import Any


class Player:
    """Subclass this, set ``name`` and write ``play``. concurrency: requests in progress at once."""

    name: str = ""
    concurrency: int = 64

    async def start(self) -> None:
        """Acquire what playing needs. Called once, before the first request."""

    async def play(self, state: Any, seed: int) -> tuple[int, ...]:
        """Return a legal move in ``state`` (the environment's state as plain values). ``seed``
        decides all randomness."""
        raise NotImplementedError(f"{type(self).__name__} does not implement play")

    async def close(self) -> None:
        """Release what ``start`` acquired."""
