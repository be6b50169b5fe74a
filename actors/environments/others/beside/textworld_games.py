"""Text adventures that TextWorld makes (``pip install textworld``, which brings jericho under the
GPL: no package of this project needs it)."""

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

_STATUS = re.compile(r"\s*>[^\n]*\Z")
"""The line at the end of what a game says, in which it waits for a command."""


class TextWorld:
    """The arguments are fields of ``textworld.GameOptions``: nb_rooms, nb_objects, quest_length,
    quest_breadth. The player reads the goal and all that was said so far. A step's reward is its
    part of the greatest score."""

    copies = False  # the interpreter of the game is native code

    def __init__(self, **arguments: int):
        import textworld  # pyright: ignore[reportMissingImports]

        self.library, self.arguments = textworld, arguments
        _options(textworld, arguments, 0)
        self.score = 0.0
        self.said: list[str] = []

    def begin(self, seed: int) -> str:
        """Make the game, and begin it."""
        infos = self.library.EnvInfos(
            feedback=True, score=True, max_score=True, won=True, objective=True, description=True
        )
        with tempfile.TemporaryDirectory() as folder:
            for name, content in _files(
                self.library, tuple(sorted(self.arguments.items())), seed
            ).items():
                Path(folder, name).write_bytes(content)
            self.environment = self.library.start(os.path.join(folder, "game.z8"), infos)
            first = self.environment.reset()
        self.most = first.max_score or 1
        self.said = [first.objective.strip(), first.description.strip()]
        return "\n\n".join(self.said)

    def turn(self, action: str) -> tuple[str, float, bool, float]:
        """Enter a command."""
        after, score, done = self.environment.step(action)
        gain, self.score = score - self.score, score
        self.said += [f"> {action}", _STATUS.sub("", after.feedback).strip()]
        return "\n\n".join(self.said), gain / self.most, done, float(bool(after.won))


def _options(textworld: Any, arguments: dict[str, int], seed: int) -> Any:
    options = textworld.GameOptions()
    options.seeds = seed % 2**31
    for name, value in arguments.items():
        if not hasattr(options, name):
            raise ValueError(f"{name}: expected a field of textworld.GameOptions")
        setattr(options, name, value)
    return options


@functools.lru_cache(64)
def _files(textworld: Any, arguments: tuple[tuple[str, int], ...], seed: int) -> dict[str, bytes]:
    """Return the files of the game of a seed, which takes seconds to make."""
    with tempfile.TemporaryDirectory() as folder:
        options = _options(textworld, dict(arguments), seed)
        options.path = os.path.join(folder, "game.z8")
        textworld.make(options)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
