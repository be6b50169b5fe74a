"""Environments of libraries that live in this process: Gymnasium's text worlds and TextArena's
offline games (docs/environments.md)."""

import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from coppice.actors.environments.base import POLICY, SPLIT, Task, Tools
from coppice.actors.environments.others.mutable import Mutable, Played
from coppice.actors.environments.others.worker import Games, Turned, random_state, set_random_state
from coppice.common.numbers import Count, Share

_PLAYING = threading.RLock()
"""Held while a game is played: first states are made in threads, and there is one random state of
the process."""
REPLY_TOKENS = 256
"""The most tokens of another player's reply."""


class InThisPython(Mutable):
    """An adapter whose library is in this process. A subclass writes ``begin`` and ``turn``, and
    says in ``copies`` whether a game can be copied."""

    copies = True

    def __init__(self, horizon: Count, actions: Sequence[str] = ()):
        super().__init__(horizon, actions)
        self.games = Games(self.begin, self.turn, self.copies)

    def begin(self, seed: int) -> tuple[Any, Turned]:
        """Return a new game, reset with ``seed``, and what its first player sees."""
        raise NotImplementedError

    def turn(self, game: Any, action: str) -> Turned:
        """Play an action, which changes the game. Raises ValueError if the library refuses it."""
        raise NotImplementedError

    def stands(self, seed: int, actions: tuple[str, ...], action: str | None) -> Turned:
        """Like ``ask``. The random state of the process stays as it was."""
        with _PLAYING:
            before = random_state()
            try:
                return self.games.answer(seed, actions, action)
            finally:
                set_random_state(before)

    async def ask(self, seed: int, actions: tuple[str, ...], action: str | None) -> Turned:
        return self.stands(seed, actions, action)

    def initial(self, task: Task) -> Played:
        return Played(task.seed, self.stands(task.seed, (), None).seen)

    async def open(self, state: Played, tools: Tools) -> Played:
        return state


# ------------------------------------------------------------------------------------ Gymnasium

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
    """The text worlds FrozenLake, CliffWalking, Taxi, Blackjack, and any environment with discrete
    actions and a text rendering.

    id: of a registered environment. arguments: further ones of ``gymnasium.make``. horizon: actions
    of an episode; the library's own limit holds as well.
    """

    name = "gymnasium"

    def __init__(self, id: str, horizon: Count = 100, arguments: dict[str, Any] | None = None):
        try:
            import gymnasium
        except ModuleNotFoundError:
            raise ValueError("gymnasium is not installed: pip install gymnasium") from None
        family = id.rpartition("/")[2].partition("-")[0]
        renders = {} if family == "Blackjack" else {"render_mode": "ansi"}
        try:
            self._make = lambda: gymnasium.make(id, **renders, **(arguments or {}))
            first = self._make()
        except (gymnasium.error.Error, TypeError) as error:
            raise ValueError(f"id = {id!r}: {error}") from None
        space: Any = first.action_space
        if renders and "ansi" not in (modes := first.metadata.get("render_modes", [])):
            remedy = "write it as text in a class of yours for environment = 'other_python'"
            raise ValueError(f"id = {id!r} renders {modes}, expected 'ansi' (text): {remedy}")
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"id = {id!r}: its actions are {space}, expected a discrete space")
        self.id, self._first, self._seeding = id, int(space.start), gymnasium.utils.seeding
        self.words = ACTIONS.get(family) or tuple(str(self._first + i) for i in range(int(space.n)))
        self.rules = f"{RULES.get(family, f'You act in {id}.')} Actions: {', '.join(self.words)}."
        super().__init__(horizon, self.words)

    def begin(self, seed: int) -> tuple[Any, Turned]:
        """The constructor draws by the seed too, where it would ask the library for chance."""
        own, chance = seed % 2**31, self._seeding.np_random
        self._seeding.np_random = lambda seed=None: chance(own if seed is None else seed)
        try:
            game = self._make()
        finally:
            self._seeding.np_random = chance
        observation, _ = game.reset(seed=own)
        return game, Turned(self._text(game, observation))

    def turn(self, game: Any, action: str) -> Turned:
        move = self._first + self.words.index(action)
        try:
            observation, reward, ended, truncated, _ = game.step(move)
            return Turned(self._text(game, observation), float(reward), bool(ended or truncated))
        except ValueError as error:  # no refusal, as the action is one of its words
            raise RuntimeError(f"{self.id} cannot play {action!r}: {error}") from error

    def allowed(self, text: str) -> str | None:
        word = text.strip().lower()
        return word if word in self.words else None

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


# ------------------------------------------------------------------------------------ TextArena


class TextArena(InThisPython):
    """id: of a game. players: all of them, the policy included. second: the share of the episodes
    in which the policy is the last to move. opponent: who plays for the others: "policy", with the
    newest weights, or a speaker that is served. actions: that a warm start may play.

    The library shows each player the whole game so far. It reads a move from a reply by rules of
    its own, and a move against the rules costs what the game says.
    """

    name = "textarena"

    def __init__(
        self,
        id: str,
        players: Count = 1,
        second: Share = 0.0,
        opponent: str = POLICY,
        horizon: Count = 100,
        actions: list[str] | None = None,
    ):
        super().__init__(horizon, actions or ())
        if players == 1 and (second or opponent != POLICY):
            raise ValueError(f"{second = }, {opponent = }: without effect with one player")
        try:
            import textarena
            from textarena.envs import registration
        except ModuleNotFoundError:
            raise ValueError("textarena is not installed: pip install textarena") from None
        if id not in registration.ENV_REGISTRY:
            names = ", ".join(sorted(registration.ENV_REGISTRY))
            raise ValueError(f"id = {id!r}: TextArena has {names}")
        self._make = lambda: textarena.make(id)
        self.players, self.second, self.opponent = players, second, opponent
        self.speakers = () if players == 1 else (opponent,)
        try:
            self.stands(0, (), None)
        except Exception as error:  # noqa: BLE001
            reason = " ".join(f"{type(error).__name__}: {error}".replace("*", "").split())
            raise ValueError(f"{id = }, {players = }: it does not begin: {reason}") from None

    def begin(self, seed: int) -> tuple[Any, Turned]:
        game = self._make()
        game.reset(num_players=self.players, seed=seed)
        last = (seed * 0x9E3779B1) % 2**32 < self.second * 2**32
        game.policy = self.players - 1 if last else 0
        return game, self._shown(game)

    def turn(self, game: Any, action: str) -> Turned:
        done, _ = game.step(action)
        if not done:
            return self._shown(game)
        rewards, _ = game.close()
        earned = float(rewards[game.policy])
        return Turned("", earned, True, float(earned > 0 and earned == max(rewards.values())))

    def _shown(self, game: Any) -> Turned:
        player, text = game.get_observation()
        return Turned(text, waits=player != game.policy)

    async def open(self, state: Played, tools: Tools) -> Played:
        first = await self.ask(state.seed, (), None)
        turned, actions = await self.others(state, first, tools)
        return Played(state.seed, turned.seen, actions, turned.reward, over=turned.done)

    async def others(
        self, state: Played, turned: Turned, tools: Tools
    ) -> tuple[Turned, tuple[str, ...]]:
        actions = state.actions
        while turned.waits and not turned.done:
            seen = msgspec.structs.replace(state, seen=turned.seen)
            (message,) = self.prompt(Task(""), seen)
            message["content"] = message["content"].replace(SPLIT, "")
            reply = await tools.say(self.opponent, [message], REPLY_TOKENS, self.stop)
            action = self.read(seen, reply + self.stop[0]).argument or reply
            turned = await self.ask(state.seed, actions, action)
            actions = (*actions, action)
        return turned, actions
