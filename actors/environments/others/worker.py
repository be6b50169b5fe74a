"""Games of a library between their steps, and what another Python runs for ``OtherPython``:
``python worker.py GAME ARGUMENTS``. It needs the standard library alone.

A request is a line [id, seed, actions so far, action] of stdin, and its answer a line of what
stands after the action. An action of null asks for what stands before, a seed of null for
``listed`` actions. Nothing is lost with this process, and its cache only saves time.

A game is a name in ``GAMES`` or ``module:Class``. The class has ``begin(seed)``, which returns what
the player sees first, and ``turn(action)``, which returns the beginning of a ``Turned``, or raises
ValueError for an action that it refuses. The player sees nothing else. An episode has an object of
its own, and ``copies = False`` in the class says that ``copy.deepcopy`` of one does not play on
alike.
"""

import collections
import copy
import functools
import importlib
import inspect
import json
import os
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy
except ModuleNotFoundError:
    numpy = None

KEPT = 256
"""The most games in a cache."""


class Turned(NamedTuple):
    """What a game answers to an action. success: of an ended episode, 1 or 0, None if the game does
    not say. waits: whether another player is to move, who sees ``seen``."""

    seen: str
    reward: float = 0.0
    done: bool = False
    success: float | None = None
    waits: bool = False


class Live(NamedTuple):
    """A game in the middle of an episode, what its player sees, and the random state of the process
    as the game left it behind."""

    game: Any
    shown: Turned
    dice: tuple[Any, Any]


class ActionRefused(ValueError):
    """A game refuses an action."""


class Games:
    """Games by their seed and actions; a step plays a copy, or plays again from the beginning. So a
    game must be determined by its seed and its actions. Many libraries draw from the random state
    of the whole process; each game has its own, which stands there while the game is played.

    begin: makes the game of a seed. turn: plays an action, which changes the game. copies: whether
    ``copy.deepcopy`` of a game gives one that plays on alike. From a full cache, the game that was
    used longest ago leaves.
    """

    def __init__(
        self, begin: Callable[[int], tuple[Any, Turned]], turn: Callable[[Any, str], Turned],
        copies: bool,
    ):  # fmt: skip
        self.begin, self.turn, self.copies = begin, turn, copies
        self._cache = collections.OrderedDict[tuple[int, tuple[str, ...]], Live]()

    def answer(self, seed: int, actions: tuple[str, ...], action: str | None) -> Turned:
        """Return what stands after an action, or before it if it is None. Raises ActionRefused if
        the game refuses it; what goes wrong before it is raised as it is."""
        live = self._cache.pop((seed, actions), None) or self._played_again(seed, actions)
        if action is None or self.copies:
            self._keep((seed, actions), live)
        if action is None:
            return live.shown
        try:
            after = self._after(copy.deepcopy(live) if self.copies else live, action)
        except ValueError as error:
            raise ActionRefused(str(error)) from error
        if not after.shown.done:
            self._keep((seed, (*actions, action)), after)
        return after.shown

    def _played_again(self, seed: int, actions: tuple[str, ...]) -> Live:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        live = Live(*self.begin(seed), random_state())
        for action in actions:
            live = self._after(live, action)
        return live

    def _after(self, live: Live, action: str) -> Live:
        set_random_state(live.dice)
        return Live(live.game, self.turn(live.game, action), random_state())

    def _keep(self, key: tuple[int, tuple[str, ...]], live: Live) -> None:
        self._cache.pop(key, None)
        self._cache[key] = live
        if len(self._cache) > KEPT:
            self._cache.popitem(last=False)


def random_state() -> tuple[Any, Any]:
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_random_state(dice: tuple[Any, Any]) -> None:
    random.setstate(dice[0])
    if numpy is not None:
        numpy.random.set_state(dice[1])


# ------------------------------------------------------------- libraries that another Python plays


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
    """The sets of reasoning-gym (``pip install reasoning-gym``): one question, one answer, a score
    between 0 and 1. name: of a set. The other arguments are its settings. Every episode is the
    first question of the set with its seed.

    In a process of their own, because some sets evaluate what the policy writes as a formula, which
    may take for ever, and some make other questions of the same seed where Python's hashes differ.
    """

    copies = False  # a question is in the cache below

    def __init__(self, name: str, **config: Any):
        self.ask = functools.partial(_question, name, json.dumps(config))
        self.ask(0)

    def listed(self) -> list[str]:
        """Return the answers to 64 questions of no run, each once."""
        entries = [self.ask(2**31 - 1 - place)[1] for place in range(64)]
        return sorted({str(entry["answer"]) for entry in entries if entry["answer"] is not None})

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


class OpenEnv:
    """Environments of OpenEnv, whose observations are seen as JSON. environment, action:
    "module:Class" of an environment and of its actions, which are JSON objects of their fields.
    field: of an action that has one, which may be written bare.

    An environment whose ``reset`` takes no seed draws from the process's random state, which the
    seed sets. An action that it refuses with a ValueError ends the episode.
    """

    def __init__(self, environment: str, action: str, field: str = ""):
        self.environment, self.action, self.field = _named(environment)(), _named(action), field

    def begin(self, seed: int) -> str:
        options = inspect.signature(self.environment.reset).parameters.values()
        takes_seed = any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in options)
        return self._shown(self.environment.reset(**({"seed": seed} if takes_seed else {})))

    def turn(self, action: str) -> tuple[str, float, bool]:
        try:
            fields = json.loads(action)
        except (ValueError, RecursionError):
            fields = action
        if not isinstance(fields, dict):
            if not self.field:
                raise ValueError("an action is a JSON object of its fields")
            try:  # the text itself first: "[4]" may be what a field of text means
                made = self.action(**{self.field: action})
            except ValueError:
                made = self.action(**{self.field: fields})
        else:
            made = self.action(**fields)
        seen = self.environment.step(made)
        return self._shown(seen), seen.reward or 0.0, seen.done

    def _shown(self, observation: Any) -> str:
        own = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"})
        return json.dumps(own, ensure_ascii=False)


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


GAMES = {"gem": Gem, "openenv": OpenEnv, "reasoning_gym": Reasoning, "textworld": TextWorld}
"""The classes of libraries by their names."""


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main(place: str, arguments: str) -> None:
    """Answer until stdin ends. What a library prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[0:1] = []  # this file's folder
    sys.path.append(os.getcwd())
    kind, options = GAMES.get(place) or _named(place), json.loads(arguments)
    kind(**options)  # wrong arguments end the process before the first request

    def begin(seed: int) -> tuple[Any, Turned]:
        game = kind(**options)
        return game, Turned(game.begin(seed))

    def turn(game: Any, action: str) -> Turned:
        played = game.turn(action)
        try:
            seen, reward, done, *success = played
            won = float(success[0]) if success and success[0] is not None else None
            return Turned(str(seen), float(reward), bool(done), won)
        except ValueError as error:  # which would be a refusal
            wish = "expected a text, a number, whether it is over, and perhaps the success"
            raise TypeError(f"{place}.turn gave {played!r}: {wish}") from error

    games = Games(begin, turn, getattr(kind, "copies", True))
    for line in requests:
        number, seed, actions, action = json.loads(line)
        try:
            answer: dict[str, Any] = {"listed": kind(**options).listed()} if seed is None else {}
            answer = answer or games.answer(seed or 0, tuple(actions), action)._asdict()
        except ActionRefused as error:
            answer = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": number, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
