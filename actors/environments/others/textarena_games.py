"""The offline games of TextArena, alone or against another player, who may be the policy itself or
a served speaker.

``pip install textarena``; data.environment = "textarena", data.options.id = "TicTacToe-v0",
data.options.players = 2.
"""

from typing import Any

from coppice.actors.environments.base import POLICY, Task, Tools
from coppice.actors.environments.others.mutable import Live, Mutable, Played, Turned
from coppice.common.numbers import Count, Share

REPLY_TOKENS = 256
"""Of another player's reply."""


class TextArena(Mutable):
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
        known = registration.ENV_REGISTRY
        if id not in known:
            raise ValueError(f"id = {id!r}: TextArena has {', '.join(sorted(known))}")
        self._make = lambda: textarena.make(id)
        self.players, self.second, self.opponent = players, second, opponent
        self.speakers = () if players == 1 or opponent == POLICY else (opponent,)
        self.rules = "You play a text game."
        try:
            self._begun(0)
        except Exception as error:  # noqa: BLE001
            reason = " ".join(f"{type(error).__name__}: {error}".replace("*", "").split())
            raise ValueError(
                f"id = {id!r}, players = {players}: it does not begin: {reason}"
            ) from None

    def seat(self, seed: int) -> int:
        """Return the number of the policy among the players in the episode of ``seed``."""
        return self.players - 1 if (seed * 0x9E3779B1) % 2**32 < self.second * 2**32 else 0

    def begin(self, seed: int) -> tuple[Any, str]:
        game = self._make()
        game.reset(num_players=self.players, seed=seed)
        game.policy = self.seat(seed)
        return game, game.get_observation()[1]

    def turn(self, environment: Any, action: str) -> Turned:
        done, _ = environment.step(action)
        if done:
            rewards, _ = environment.close()
            earned = float(rewards[environment.policy])
            return Turned("", earned, True, float(earned > 0 and earned == max(rewards.values())))
        player, text = environment.get_observation()
        return Turned(text, 0.0, False, waits=player != environment.policy)

    async def open(self, state: Played, tools: Tools) -> Played:
        """Return the state at the policy's first turn."""
        live = await self.standing(state)
        waits = live.environment.state.current_player_id != live.environment.policy
        turned, actions = await self.others(
            live, Turned(state.seen, 0.0, False, waits=waits), tools
        )
        first = Played(state.seed, turned.seen, actions, turned.reward)
        self.keep(first, live)
        return first

    async def others(
        self, live: Live, turned: Turned, tools: Tools
    ) -> tuple[Turned, tuple[str, ...]]:
        actions: list[str] = []
        while turned.waits and not turned.done:
            messages = self.prompt(Task(""), Played(0, turned.seen))
            reply = await tools.say(
                self.opponent,
                [
                    {"role": m["role"], "content": m["content"].replace("\x1e", "")}
                    for m in messages
                ],
                REPLY_TOKENS,
                self.stop,
            )
            action = self.read(Played(0, ""), reply + self.stop[0]).answer or reply
            actions.append(action)
            turned = await self.played(live, action)
        return turned, tuple(actions)
