"""The classes that ``OtherPython`` knows by the names of their libraries."""

import copy
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any


class Gem:
    """The games of GEM (``pip install gem-llm``), with all that was said so far in view, as the
    games themselves expect. id: such as "game:GuessTheNumber-v0-easy"; the other arguments are
    those of ``gem.make``."""

    def __init__(self, id: str, **arguments: Any):
        import gem  # pyright: ignore[reportMissingImports]

        self.environment = gem.make(id, **arguments)
        self.said: list[str] = []

    def begin(self, seed: int) -> str:
        return self._shown(*self.environment.reset(seed=seed))

    def turn(self, action: str) -> tuple[str, float, bool]:
        """Play an action, which GEM reads in \\boxed{}."""
        boxed = action if "\\boxed{" in action else f"\\boxed{{{action}}}"
        observation, reward, terminated, truncated, details = self.environment.step(boxed)
        self.said.append(f"> {boxed}")
        return self._shown(observation, details), reward, terminated or truncated

    def _shown(self, observation: str, details: dict[str, Any]) -> str:
        self.said.append(observation.strip())
        return "\n".join([*self.said, details.get("suffix", "")]).strip()


class Reasoning:
    """The sets of reasoning-gym (``pip install reasoning-gym``). name: of a set. The other
    arguments are its settings. The action is the answer, and the reward its score.

    In a process of their own, because some sets evaluate what the policy writes as a formula, which
    may take for ever, and some make other questions of the same seed where Python's hashes differ.
    """

    copies = False  # a question is in the cache below

    def __init__(self, name: str, **config: Any):
        self.ask = functools.partial(_question, name, json.dumps(config))

    def begin(self, seed: int) -> str:
        self.questions, self.entry = self.ask(seed)
        return self.entry["question"]

    def turn(self, action: str) -> tuple[str, float, bool, float]:
        """Score an answer, with the library's partial credit; one at which the library fails scores
        0."""
        try:  # of a copy, because some sets write down in it what they score
            score = float(self.questions.score_answer(action, copy.deepcopy(self.entry)))
        except Exception:  # noqa: BLE001
            score = 0.0
        return "", score, True, float(score >= 1)


@functools.lru_cache(256)  # some sets take seconds to make a question
def _question(name: str, config: str, seed: int) -> tuple[Any, dict[str, Any]]:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    questions = reasoning_gym.create_dataset(name, seed=seed, size=1, **json.loads(config))
    return questions, questions[0]


_STATUS = re.compile(r"\s*>[^\n]*\Z")
"""The line at the end of what a game of TextWorld says, in which it waits for a command."""


class TextWorld:
    """Text adventures that TextWorld makes (``pip install textworld``, which brings jericho under
    the GPL: no package of this project needs it).

    The arguments are fields of ``textworld.GameOptions``: nb_rooms, nb_objects, quest_length,
    quest_breadth. The player reads the goal and all that was said so far. A step's reward is its
    part of the greatest score.
    """

    copies = False  # the interpreter of the game is native code

    def __init__(self, **arguments: int):
        import textworld  # pyright: ignore[reportMissingImports]

        self.library, self.arguments = textworld, arguments
        _options(textworld, arguments, 0)
        self.score = 0.0
        self.said: list[str] = []

    def begin(self, seed: int) -> str:
        infos = self.library.EnvInfos(
            feedback=True, score=True, max_score=True, won=True, objective=True, description=True
        )
        arguments = tuple(sorted(self.arguments.items()))
        with tempfile.TemporaryDirectory() as folder:
            for name, content in _files(self.library, arguments, seed).items():
                Path(folder, name).write_bytes(content)
            self.environment = self.library.start(os.path.join(folder, "game.z8"), infos)
            first = self.environment.reset()
        self.most = first.max_score or 1
        self.said = [first.objective.strip(), first.description.strip()]
        return "\n\n".join(self.said)

    def turn(self, action: str) -> tuple[str, float, bool, float]:
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
