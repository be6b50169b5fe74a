"""What another Python runs for ``OtherPython``: ``python worker.py MODULE:CLASS ARGUMENTS KEPT``.
It needs the standard library alone.

A request is a line [id, seed, actions so far, action] of stdin, and its answer a line of what
stands after the action; an action of null asks for what stands before. So a request says all that
it needs: nothing is lost with this process, and the objects in its cache only save time.

The class has ``begin(seed)``, which returns what the player sees first, and ``turn(action)``, which
returns (what the player sees, reward, whether the episode has ended), and after an end success (1
or 0) as a fourth if the game knows; it raises ValueError for an action that it refuses. What the
player sees is all that it needs to know, because nothing else is shown to it. An episode has an
object of its own, and ``copies = False`` in the class says that ``copy.deepcopy`` of one does not
play on alike.
"""

import collections
import copy
import importlib
import json
import os
import random
import sys
import traceback
from typing import Any

try:
    import numpy
except ModuleNotFoundError:
    numpy = None


class Live:
    """A game in the middle of an episode, with the random state of the process as the game left it
    behind."""

    def __init__(self, kind: Any, arguments: dict[str, Any], seed: int):
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        self.game = kind(**arguments)
        self.seen = self.game.begin(seed)
        self.dice = _dice()

    def turn(self, action: str) -> tuple[Any, ...]:
        """Play an action."""
        random.setstate(self.dice[0])
        if numpy is not None:
            numpy.random.set_state(self.dice[1])
        turned = self.game.turn(action)
        self.seen, self.dice = turned[0], _dice()
        return turned


def _dice() -> tuple[Any, Any]:
    return random.getstate(), None if numpy is None else numpy.random.get_state()


class Games:
    """Games by their seed and actions. kept: the most of them; the one that was used longest ago
    leaves."""

    def __init__(self, kind: Any, arguments: dict[str, Any], kept: int):
        self.kind, self.arguments, self.kept = kind, arguments, kept
        self.copies = getattr(kind, "copies", True)
        self._cache: collections.OrderedDict[tuple[int, tuple[str, ...]], Live] = (
            collections.OrderedDict()
        )

    def answer(self, seed: int, actions: list[str], action: str | None) -> dict[str, Any]:
        """Return what a request asks for."""
        key = seed, tuple(actions)
        live = self._standing(*key)
        if action is None:
            self._keep(key, live)
            return {"seen": live.seen}
        try:
            seen, reward, done, *success = live.turn(action)
        except ValueError as error:
            return {"refused": str(error)}
        if not done:
            self._keep((seed, (*key[1], action)), live)
        known = {"success": float(success[0])} if success and success[0] is not None else {}
        return {"seen": str(seen), "reward": float(reward), "done": bool(done), **known}

    def _standing(self, seed: int, actions: tuple[str, ...]) -> Live:
        """Return a game that nobody else plays."""
        key = seed, actions
        if key not in self._cache:
            live = Live(self.kind, self.arguments, seed)
            for action in actions:
                live.turn(action)
            self._keep(key, live)
        return copy.deepcopy(self._cache[key]) if self.copies else self._cache.pop(key)

    def _keep(self, key: tuple[int, tuple[str, ...]], live: Live) -> None:
        self._cache[key] = live
        self._cache.move_to_end(key)
        if len(self._cache) > self.kept:
            self._cache.popitem(last=False)


def main(place: str, arguments: str, kept: str) -> None:
    """Answer until stdin ends. What a library prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.append(os.getcwd())
    module, _, name = place.partition(":")
    games = Games(getattr(importlib.import_module(module), name), json.loads(arguments), int(kept))
    games.kind(**games.arguments)  # wrong arguments end the process before the first request
    for line in requests:
        number, *request = json.loads(line)
        try:
            answer = games.answer(*request)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": number, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
