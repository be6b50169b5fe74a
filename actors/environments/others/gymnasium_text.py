"""Gymnasium's small text worlds (FrozenLake, CliffWalking, Taxi, Blackjack), and any of its
environments with discrete actions and a text rendering.

``pip install gymnasium``; data.environment = "gymnasium", data.options.id = "FrozenLake-v1".
"""

import re
from typing import Any

from coppice.actors.environments.others.in_other_python.worker import Turned
from coppice.actors.environments.others.mutable import InThisPython
from coppice.common.numbers import Count

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Words for the numbers of the actions, in their order."""
RULES = {
    "FrozenLake": "You walk over a frozen lake from S to G. F is ice, H is a hole that ends the"
    " walk. Your place is marked.",
    "CliffWalking": "You are x and walk to T. Each step costs 1. C is a cliff: it costs 100 and"
    " takes you back to the start.",
    "Taxi": "You drive a taxi. Fetch the passenger, who waits at the blue letter, and drop him off"
    " at the magenta one. [ ] is the taxi, [ ] with a letter too. : can be passed, | cannot.",
    "Blackjack": "You play Blackjack against the dealer: come nearer to 21 than the dealer without"
    " going over it.",
}
_COLOUR = re.compile(r"\x1b\[([\d;]*)m((?:(?!\x1b\[[\d;]+m).)*?)\x1b\[0m", re.DOTALL)
"""An innermost coloured cell."""


class Gymnasium(InThisPython):
    """id: of a registered environment. arguments: those of ``gymnasium.make`` beside it. horizon:
    actions of an episode; the library's own limit holds as well."""

    name = "gymnasium"

    def __init__(self, id: str, horizon: Count = 100, arguments: dict[str, Any] | None = None):
        super().__init__(horizon)
        try:
            import gymnasium
        except ModuleNotFoundError:
            raise ValueError("gymnasium is not installed: pip install gymnasium") from None
        family = id.rpartition("/")[2].partition("-")[0]
        renders = {} if family == "Blackjack" else {"render_mode": "ansi"}
        try:
            self._make = lambda: gymnasium.make(id, **renders, **(arguments or {}))
            space: Any = self._make().action_space
        except (gymnasium.error.Error, TypeError) as error:
            raise ValueError(f"id = {id!r}: {error}") from None
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"id = {id!r}: its actions are {space}, expected a discrete space")
        self.id, self._first = id, int(space.start)
        self.words = ACTIONS.get(family) or tuple(str(self._first + i) for i in range(int(space.n)))
        self.rules = f"{RULES.get(family, f'You act in {id}.')} Actions: {', '.join(self.words)}."

    def begin(self, seed: int) -> tuple[Any, Turned]:
        game = self._make()
        observation, _ = game.reset(seed=seed % 2**31)
        return game, Turned(self._text(game, observation))

    def turn(self, game: Any, action: str) -> Turned:
        move = self._first + self.words.index(action)
        observation, reward, ended, truncated, _ = game.step(move)
        return Turned(self._text(game, observation), float(reward), bool(ended or truncated))

    def allowed(self, text: str) -> str | None:
        word = text.strip().lower()
        return word if word in self.words else None

    def replies(self, state: Any) -> list[str]:
        return [f"<action>{word}</action>" for word in self.words]

    def _text(self, game: Any, observation: Any) -> str:
        if self.id.startswith("Blackjack"):
            own, dealer, ace = observation
            usable = " with a usable ace" if ace else ""
            return f"Your sum is {own}{usable}. The dealer shows {dealer}."
        text, coloured = str(game.render()), 1
        while coloured:
            text, coloured = _COLOUR.subn(_marked, text)
        return text.strip()


def _marked(match: re.Match[str]) -> str:
    """A coloured cell as text: the place of the player in brackets, the taxi's passenger and goal
    by their words."""
    words = {"34;1": "blue", "35": "magenta"}
    return f"[{match[2]}]" if match[1] not in words else f"{match[2]}({words[match[1]]})"
