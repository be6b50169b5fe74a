"""Environments of other libraries under this project's contract: their objects change while they
are played, our states do not. A state is seed and actions, which must determine the game."""

from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from coppice.actors.environments.game import ACTION
from coppice.actors.environments.others.worker import ActionRefused, Turned
from coppice.common.numbers import Count

FORMAT = "Reply with one action between <action> and </action>."


class Played(msgspec.Struct, frozen=True):
    """A state: the seed, the actions of all players so far, what the next player sees now, the sum
    of the rewards so far, and the policy's turns. over: others ended it before the policy acted."""

    seed: int
    seen: str
    actions: tuple[str, ...] = ()
    earned: float = 0.0
    turns: int = 0
    over: bool = False


class Mutable(Environment):
    """Base of the adapters. A subclass writes ``ask``, and names in ``rules`` what the policy must
    know.

    horizon: actions after which an episode ends with what it has earned. An action that cannot be
    read, or that the library refuses, ends the episode too.
    """

    measured: Sequence[str] = ("success",)
    gives_step_rewards = True
    rewarded_by_judge = False
    stop = ["</action>"]
    rules = "You play a text game."

    def __init__(self, horizon: Count, actions: Sequence[str] = ()):
        self.horizon = horizon
        if actions:  # among which a warm start and a player without a model choose
            self.replies = lambda state: [f"<action>{action}</action>" for action in actions]

    async def ask(self, seed: int, actions: tuple[str, ...], action: str | None) -> Turned:
        """Return what stands after an action, or before it if it is None. Raises ActionRefused if
        the library refuses it."""
        raise NotImplementedError

    async def others(
        self, state: Played, turned: Turned, tools: Tools
    ) -> tuple[Turned, tuple[str, ...]]:
        """Let other players act after ``state.actions`` until it is the policy's turn. Returns what
        the policy then sees, and the actions of all players."""
        return turned, state.actions

    def allowed(self, text: str) -> str | None:
        """Return the action that the text of an action block means, None if it means none."""
        return text.strip() or None

    # ------------------------------------------------------------------------------- the contract

    def task(self, seed: int) -> Task:
        return Task(f"{self.name}-{seed}", seed=seed)

    def initial(self, task: Task) -> Played:
        return Played(task.seed, "")

    async def open(self, state: Played, tools: Tools) -> Played:
        shown = await self.ask(state.seed, (), None)
        return msgspec.structs.replace(state, seen=shown.seen)

    def prompt(self, task: Task, state: Played) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{self.rules}\n{FORMAT}\n{SPLIT}\n{state.seen}"}]

    def read(self, state: Played, text: str) -> Action:
        if not (blocks := ACTION.findall(text)):
            return Action("invalid", text)
        action = self.allowed(blocks[-1])
        return Action("illegal" if action is None else "move", text, action)

    async def step(self, state: Played, action: Action, tools: Tools) -> Transition:
        if state.over:
            raise base.Dropped(f"{self.name}, seed {state.seed}: over before the policy acted")
        if action.argument is None:
            return self.outgrown(state)
        before = (await self.ask(state.seed, state.actions, None)).seen
        if before != state.seen:
            raise base.Diverged(
                f"{self.name}, seed {state.seed}: after {len(state.actions)} actions, played again,"
                f" the game shows {brief(before)}, where it had shown {brief(state.seen)}: seed and"
                " actions must determine it, so set in data.options what else it draws"
            )
        try:
            turned = await self.ask(state.seed, state.actions, action.argument)
        except ActionRefused:
            return self.outgrown(state)
        actions = (*state.actions, action.argument)
        moved = msgspec.structs.replace(state, actions=actions)
        turned, actions = await self.others(moved, turned, tools)
        earned, turns = state.earned + turned.reward, state.turns + 1
        after = Played(state.seed, turned.seen, actions, earned, turns)
        if not turned.done and after.turns < self.horizon:
            return Transition(after, turned.seen, False, reward=turned.reward)
        success = after.earned > 0 if turned.success is None else turned.success
        measures = {"success": float(success)}
        return Transition(after, turned.seen, True, after.earned, measures, turned.reward)

    def outgrown(self, state: Played) -> Transition:
        """Return the end of an episode: what it has earned so far, and no success."""
        return Transition(state, "", True, state.earned, {"success": 0.0}, 0.0)
