"""Games of a library between their steps, and what another Python runs for ``OtherPython``:
``python worker.py MODULE:CLASS ARGUMENTS``. It needs the standard library alone.

A request is a line [id, seed, actions so far, action] of stdin, and its answer a line of what
stands after the action; an action of null asks for what stands before. So nothing is lost with this
process, and the games in its cache only save time.

The class has ``begin(seed)``, which returns what the player sees first, and ``turn(action)``, which
returns the beginning of a ``Turned``, or raises ValueError for an action that it refuses. The
player sees nothing else. An episode has an object of its own, and ``copies = False`` in the class
says that ``copy.deepcopy`` of one does not play on alike.
"""

import collections
import copy
import importlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
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
        self,
        begin: Callable[[int], tuple[Any, Turned]],
        turn: Callable[[Any, str], Turned],
        copies: bool,
    ):
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
    """Return the random states of Python and numpy in this process."""
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_random_state(dice: tuple[Any, Any]) -> None:
    """Set both to ``dice``."""
    random.setstate(dice[0])
    if numpy is not None:
        numpy.random.set_state(dice[1])


def main(place: str, arguments: str) -> None:
    """Answer until stdin ends. What a library prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.append(os.getcwd())
    module, _, name = place.partition(":")
    kind, options = getattr(importlib.import_module(module), name), json.loads(arguments)
    kind(**options)  # wrong arguments end the process before the first request

    def begin(seed: int) -> tuple[Any, Turned]:
        game = kind(**options)
        return game, Turned(game.begin(seed))

    def turn(game: Any, action: str) -> Turned:
        seen, reward, done, *success = game.turn(action)
        won = float(success[0]) if success and success[0] is not None else None
        return Turned(str(seen), float(reward), bool(done), won)

    games = Games(begin, turn, getattr(kind, "copies", True))
    for line in requests:
        number, seed, actions, action = json.loads(line)
        try:
            answer: dict[str, Any] = games.answer(seed, tuple(actions), action)._asdict()
        except ActionRefused as error:
            answer = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": number, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
