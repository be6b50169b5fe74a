"""Environments of other libraries under this project's contract: their objects change while they
are played, our states do not.

A state says how an episode was played: its seed and its actions. The object that stands there is
kept in a cache, and a step plays a copy of it; what is not in the cache, after a crash or in
another process, is played again from the beginning. So every library's environment must be
determined by its seed and its actions, which a contract test holds of each
(tests/actors/test_other_environments.py). Many libraries draw from the random state of the whole
process; each object has its own, which stands there only while the object is played.
"""

import collections
import contextlib
import copy
import random
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from coppice.common.numbers import Count

_ONE = threading.RLock()
"""Held while an object is played, and while a cache changes: first states are made in threads, and
there is one random state of the process."""
KEPT = 256
"""Objects in the cache; the one that was used longest ago leaves."""
_BLOCK = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class Played(msgspec.Struct, frozen=True):
    """A state: the seed, the actions of all players so far, what the next player sees now, the sum
    of the rewards so far, and the policy's turns."""

    seed: int
    seen: str
    actions: tuple[str, ...] = ()
    earned: float = 0.0
    turns: int = 0


class Turned(msgspec.Struct, frozen=True):
    """What a library's environment answers to an action. success: of an ended episode, 1 or 0, None
    if the library does not say. waits: whether another player is to move, who sees ``seen``."""

    seen: str
    reward: float
    done: bool
    success: float | None = None
    waits: bool = False


class Live:
    """An object of the library, with the random states of Python and numpy that it has left behind."""

    def __init__(self, seed: int):
        self.seed = seed
        self.environment: Any = None
        self.dice = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Have the process's random state be this object's."""
        with _ONE:
            before = random.getstate(), np.random.get_state()
            _roll(self.dice)
            try:
                yield
            finally:
                self.dice = random.getstate(), np.random.get_state()
                _roll(before)


def _roll(dice: tuple[Any, Any]) -> None:
    random.setstate(dice[0])
    np.random.set_state(dice[1])


class Mutable(Environment):
    """Base of the adapters. A subclass writes ``begin`` and ``turn``, and names in ``rules`` what
    the policy must know.

    horizon: actions after which an episode ends with what it has earned. An action that cannot be
    read, or that the library refuses, ends the episode too. copies: whether ``copy.deepcopy`` of an
    object gives one that plays on alike; without it siblings are played from the beginning.
    """

    measured: Sequence[str] = ("success",)
    gives_step_rewards = True
    rewarded_by_judge = False
    headline = "return"
    stop = ["</action>"]
    copies = True
    rules = ""

    def __init__(self, horizon: Count, kept: Count = KEPT):
        self.horizon, self.kept = horizon, kept
        self._cache: collections.OrderedDict[tuple[int, tuple[str, ...]], Live] = (
            collections.OrderedDict()
        )
        self.turns = 0
        """Actions that were played by the library, those of the way back to a state included."""

    # ------------------------------------------------------------------------------------------ of
    # each library

    def begin(self, seed: int) -> tuple[Any, str]:
        """Return a new object of the library, reset with ``seed``, and what its first player sees."""
        raise NotImplementedError

    def turn(self, environment: Any, action: str) -> Turned:
        """Play an action, which changes the object. Raises ValueError if the library refuses it."""
        raise NotImplementedError

    def allowed(self, text: str) -> str | None:
        """Return the action that the text of an action block means, None if it means none."""
        return text.strip() or None

    # ------------------------------------------------------------------------------------------ the
    # contract

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``."""
        return Task(f"{self.name}-{seed}", seed=seed)

    def initial(self, task: Task) -> Played:
        """Return the state before the first action."""
        live, seen = self._begun(task.seed)
        state = Played(task.seed, seen)
        self.keep(state, live)
        return state

    def prompt(self, task: Task, state: Played) -> list[dict[str, Any]]:
        """Return one user message: the rules, then what the policy sees."""
        how = "Reply with one action between <action> and </action>."
        return [{"role": "user", "content": f"{self.rules}\n{how}\n{SPLIT}\n{state.seen}"}]

    def read(self, state: Played, text: str) -> Action:
        """Return the action of the last action block."""
        blocks = _BLOCK.findall(text)
        if not blocks:
            return Action("invalid", text)
        action = self.allowed(blocks[-1])
        return Action("illegal", text) if action is None else Action("move", text, answer=action)

    async def step(self, state: Played, action: Action, tools: Tools) -> Transition:
        """Play the action on a copy of the object that stands in ``state``."""
        if action.answer is None:
            return self.outgrown(state)
        live = await self.standing(state)
        try:
            turned = await self.played(live, action.answer)
        except ValueError:
            self.forget(live)
            return self.outgrown(state)
        turned, answers = await self.others(live, turned, tools)
        actions = (*state.actions, action.answer, *answers)
        after = Played(
            state.seed, turned.seen, actions, state.earned + turned.reward, state.turns + 1
        )
        if turned.done or after.turns >= self.horizon:
            success = float(after.earned > 0) if turned.success is None else turned.success
            self.forget(live)
            return Transition(
                after, turned.seen, True, after.earned, {"success": success}, turned.reward
            )
        self.keep(after, live)
        return Transition(after, turned.seen, False, reward=turned.reward)

    async def others(
        self, live: "Live", turned: Turned, tools: Tools
    ) -> tuple[Turned, tuple[str, ...]]:
        """Let other players act until it is the policy's turn. Returns what the policy then sees,
        with the sum of the rewards, and their actions."""
        return turned, ()

    def outgrown(self, state: Played) -> Transition:
        """Return the end of an episode that cannot go on: what it has earned so far, and no
        success."""
        return Transition(state, "", True, state.earned, {"success": 0.0}, 0.0)

    # ------------------------------------------------------------------------------------------
    # objects

    async def standing(self, state: Played) -> "Live":
        """Return an object that stands in ``state`` and that nobody else has: a copy, or one that
        is played from the beginning."""
        key = state.seed, state.actions
        with _ONE:
            if key in self._cache and self.copies:
                self._cache.move_to_end(key)
                return copy.deepcopy(self._cache[key])
            if key in self._cache:
                return self._cache.pop(key)
        live = await self.began(state.seed)
        for action in state.actions:
            await self.played(live, action)
        return live

    async def began(self, seed: int) -> "Live":
        """Return an object at the beginning."""
        return self._begun(seed)[0]

    async def played(self, live: "Live", action: str) -> Turned:
        """Play an action."""
        self.turns += 1
        with live.playing():
            return self.turn(live.environment, action)

    def keep(self, state: Played, live: "Live") -> None:
        """Keep an object that stands in ``state``."""
        key = state.seed, state.actions
        with _ONE:
            if key in self._cache:  # a sibling has played the same
                self.forget(self._cache.pop(key))
            self._cache[key] = live
            while len(self._cache) > self.kept:
                self.forget(self._cache.popitem(last=False)[1])

    def forget(self, live: "Live") -> None:
        """An object has left the cache, or its episode has ended."""

    def _begun(self, seed: int) -> "tuple[Live, str]":
        live = Live(seed)
        with live.playing():
            live.environment, seen = self.begin(seed)
        return live, seen
