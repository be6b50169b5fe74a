"""SOTOPIA: two agents with private goals talk to each other, and one of them is trained
(docs/sotopia.md).

Each turn of the trained side is a fresh prompt. The partner replies while the environment steps, so
the partner's words are observations: they stand in the tree and in the next prompt, and no loss is
taken on their tokens. A judge gives the outcome of the whole conversation.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from coppice.actors.environments.base import (
    HELD_OUT_SEEDS,
    POLICY,
    SPLIT,
    Action,
    Environment,
    Task,
    Tools,
    Transition,
)
from coppice.actors.environments.sotopia import conversation
from coppice.actors.environments.sotopia.conversation import DIMENSIONS, Conversation, Turn
from coppice.actors.environments.sotopia.scenarios import Agent, Combo, Scenario, load, shown
from coppice.common.numbers import Count
from coppice.wire.messages import JudgedTurn

HELD_OUT_EVERY = 4
"""Every fourth scenario is held out, so that held-out conversations are about goals that training
never sees."""
TRIES = 2
"""How often the partner is asked until its reply can be read. After that its turn counts as "none".
"""


class State(msgspec.Struct, frozen=True):
    """A conversation. combo: the key of the scenario with its agents. trained: the side that the
    policy plays for training."""

    combo: str
    trained: int
    turns: tuple[Turn, ...] = ()


class Sotopia(Environment):
    """The rules of a conversation.

    scenarios: a path for ``scenarios.load``, "" for our own. partner: "policy" (self-chat) or a
    served speaker, whose replies have at most partner_tokens tokens. side: which agent is trained;
    the first one begins. turns: of both sides together. judge: the judge of outcomes. profiles: a
    side knows of the other what their relationship tells, or at most the name ("hidden", as in
    SOTOPIA's current release). word_endings: certain words end the conversation (see
    ``FAREWELLS``). split: whether every fourth scenario is held out, or none ("all").
    """

    name = "sotopia"
    headline = "goal"

    def __init__(
        self,
        scenarios: str = "",
        partner: str = POLICY,
        side: Literal["first", "second", "random"] = "random",
        turns: Count = 20,
        partner_tokens: Count = 512,
        judge: str = "sotopia_rules",
        profiles: Literal["relationship", "hidden"] = "relationship",
        word_endings: bool = False,
        split: Literal["scenarios", "all"] = "scenarios",
    ):
        self.library = load(scenarios)
        if turns < 2:
            raise ValueError(f"turns = {turns}: expected 2 or more, because two agents take turns")
        unruled = [key for key, scenario in self.library.envs.items() if scenario.rules is None]
        if judge == "sotopia_rules" and unruled:
            raise ValueError(
                f"judge = 'sotopia_rules': scenario {unruled[0]!r} has no rules to check; use judge = 'sotopia'"
            )
        self.partner, self.side, self.turns, self.partner_tokens = (
            partner,
            side,
            turns,
            partner_tokens,
        )
        self.profiles, self.word_endings = profiles, word_endings
        self.outcome_judge, self.speakers = judge, (partner,)
        self._combos = {combo.pk: combo for combo in self.library.combos}
        last = HELD_OUT_EVERY - 1
        apart = {
            key for index, key in enumerate(self.library.envs) if index % HELD_OUT_EVERY == last
        }
        self._held_out = [
            combo for combo in self.library.combos if combo.env_id in apart or split == "all"
        ]
        self._training = [
            combo for combo in self.library.combos if combo.env_id not in apart or split == "all"
        ]
        if not self._held_out or not self._training:
            raise ValueError(
                f"split = 'scenarios': {len(self.library.envs)} scenarios leave no episode to train on or to hold out; expected"
                f" {HELD_OUT_EVERY} or more, or split = 'all'"
            )

    # ------------------------------------------------------------------------------------------
    # tasks

    def task(self, seed: int) -> Task:
        """Return the episode of ``seed``: seeds in a row take all episodes in turn, and then all
        with the other side."""
        combos, number = self._drawn(seed)
        combo = combos[number % len(combos)]
        return Task(
            f"{self.name}-{seed}", source=self.library.envs[combo.env_id].codename, seed=seed
        )

    def initial(self, task: Task) -> State:
        """Return the conversation before its first turn."""
        combos, number = self._drawn(task.seed)
        sides = {"first": 0, "second": 1, "random": number // len(combos) % 2}
        return State(combos[number % len(combos)].pk, sides[self.side])

    def _drawn(self, seed: int) -> tuple[list[Combo], int]:
        return (
            (self._held_out, seed - HELD_OUT_SEEDS.start)
            if seed in HELD_OUT_SEEDS
            else (self._training, seed)
        )

    # ------------------------------------------------------------------------------------------
    # turns

    def prompt(self, task: Task, state: State) -> list[dict[str, str]]:
        """Return what the trained side is told: its role and the rules, then the conversation so
        far."""
        return self._told(state, state.trained)

    def read(self, state: State, text: str) -> Action:
        """Return the action of the last JSON object in ``text``; its kind is one of the five, or
        "invalid"."""
        turn = conversation.read(text, 0)
        return (
            Action("invalid", text)
            if turn is None
            else Action(turn.kind, text, answer=turn.argument)
        )

    def replies(self, state: State) -> list[str]:
        """Return the replies without words: to do nothing and to leave."""
        return [json.dumps({"action_type": kind, "argument": ""}) for kind in ("none", "leave")]

    async def open(self, state: State, tools: Tools) -> State:
        """Let the partner begin if the trained side is the second. A partner that leaves at once
        has done nothing instead."""
        if state.trained == 0 or state.turns:
            return state
        first = await self._reply(state, tools)
        return msgspec.structs.replace(
            state, turns=(first if first.kind != "leave" else Turn(0, "none"),)
        )

    async def step(self, state: State, action: Action, tools: Tools) -> Transition:
        """Add the turn of the trained side and, unless it ended the conversation, the partner's. An
        invalid reply does nothing."""
        turns = (*state.turns, _turn(action, state.trained))
        if not self._over(turns):
            turns = (*turns, await self._reply(msgspec.structs.replace(state, turns=turns), tools))
        after, done = msgspec.structs.replace(state, turns=turns), self._over(turns)
        names = [agent.name for agent in self._cast(state)[1]]
        answered = [
            conversation.line(turn, names[turn.side]) for turn in turns[len(state.turns) + 1 :]
        ]
        return Transition(
            after, "\n".join([*answered, *(["The conversation is over."] if done else [])]), done
        )

    async def _reply(self, state: State, tools: Tools) -> Turn:
        side = 1 - state.trained
        for _ in range(TRIES):
            text = await tools.say(self.partner, self._told(state, side), self.partner_tokens, [])
            action = self.read(state, text)
            if action.valid:
                return _turn(action, side)
        return Turn(side, "none")

    def _over(self, turns: Sequence[Turn]) -> bool:
        return conversation.over(turns, self.turns, self.word_endings)

    def _cast(self, state: State) -> tuple[Scenario, list[Agent]]:
        combo = self._combos[state.combo]
        return self.library.envs[combo.env_id], [
            self.library.agents[key] for key in combo.agent_ids
        ]

    def _told(self, state: State, side: int) -> list[dict[str, str]]:
        scenario, agents = self._cast(state)
        level, me, other, viewer = (
            scenario.relationship,
            agents[side],
            agents[1 - side],
            f"agent_{side}",
        )
        known = level if self.profiles == "relationship" else min(level, 1)
        names = [other.name if known else conversation.STRANGER] * 2
        names[side] = me.name
        text = conversation.INSTRUCTIONS.format(
            scenario=shown(scenario.scenario, viewer), relationship=conversation.RELATIONSHIPS[level],
            own=conversation.profile(me, 5, own=True), other=conversation.profile(other, known),
            goal=shown(scenario.agent_goals[side], viewer), limit=self.turns, split=SPLIT, number=len(state.turns) + 1,
            history=conversation.history(state.turns, names) or "Nobody has done anything yet.", name=me.name,
        )  # fmt: skip
        return [{"role": "user", "content": text}]

    # ------------------------------------------------------------------------------------------
    # judging

    def concluded(
        self, task: Task, before: State, action: Action, after: State | None, step: int, budget: int
    ) -> JudgedTurn:
        """Return the whole conversation, both sides, as the outcome judge sees it
        (``JudgedTurn.state`` is a ``Conversation``)."""
        state = after or msgspec.structs.replace(
            before, turns=(*before.turns, _turn(action, before.trained))
        )
        scenario, agents = self._cast(state)
        names = (agents[0].name, agents[1].name)
        whole = Conversation(
            scenario=shown(scenario.scenario, "environment"),
            names=names,
            profiles=(
                conversation.profile(agents[0], 5, own=True),
                conversation.profile(agents[1], 5, own=True),
            ),
            goals=(
                shown(scenario.agent_goals[0], "agent_0"),
                shown(scenario.agent_goals[1], "agent_1"),
            ),
            trained=state.trained,
            turns=state.turns,
            rules=scenario.rules,
        )
        turn = super().judged(task, before, action, step, budget)
        return msgspec.structs.replace(
            turn,
            state=msgspec.to_builtins(whole),
            transcript=conversation.history(state.turns, names),
        )

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return the outcome, the dimensions that the judge gave, the number of the trained side's
        turns, and which of them were valid."""
        last = turns[-1]
        results = {name: [last[name]] for name in ("outcome", *DIMENSIONS) if name in last}
        valid = [turn["valid"] for turn in turns if "valid" in turn]
        return {"goal": []} | results | {"turns": [float(len(turns))], "valid": valid}


def _turn(action: Action, side: int) -> Turn:
    return Turn(side, action.kind, action.answer or "") if action.valid else Turn(side, "none")
