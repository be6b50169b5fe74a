"""The offline games of TextArena, alone or against another player, who may be the policy itself or
a served speaker.

``pip install textarena``; data.environment = "textarena", data.options.id = "TicTacToe-v0",
data.options.players = 2.
"""

from typing import Any

import msgspec

from coppice.actors.environments.base import POLICY, SPLIT, Task, Tools
from coppice.actors.environments.others.in_other_python.worker import Turned
from coppice.actors.environments.others.mutable import InThisPython, Played
from coppice.common.numbers import Count, Share

REPLY_TOKENS = 256
"""Of another player's reply."""


class TextArena(InThisPython):
    """id: of a game. players: all of them, the policy included. second: the share of the episodes
    in which the policy is the last to move. opponent: who plays for the others: "policy", with the
    newest weights, or a speaker that is served.

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
    ):
        super().__init__(horizon)
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
        self.speakers = () if players == 1 or opponent == POLICY else (opponent,)
        self.rules = "You play a text game."
        try:
            self.stands(0, (), None)
        except Exception as error:  # noqa: BLE001
            reason = " ".join(f"{type(error).__name__}: {error}".replace("*", "").split())
            raise ValueError(
                f"id = {id!r}, players = {players}: it does not begin: {reason}"
            ) from None

    def seat(self, seed: int) -> int:
        """Return the number of the policy among the players in the episode of ``seed``."""
        return self.players - 1 if (seed * 0x9E3779B1) % 2**32 < self.second * 2**32 else 0

    def begin(self, seed: int) -> tuple[Any, Turned]:
        game = self._make()
        game.reset(num_players=self.players, seed=seed)
        game.policy = self.seat(seed)
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
        """Return the state at the policy's first turn."""
        first = await self.ask(state.seed, (), None)
        turned, actions = await self.others(state, first, tools)
        return Played(state.seed, turned.seen, actions, turned.reward)

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
