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
        self.partner, self.partner_tokens, self.speakers = partner, partner_tokens, (partner,)
        self.side, self.turns, self.outcome_judge = side, turns, judge
        self.profiles, self.word_endings = profiles, word_endings
        self._combos = {combo.pk: combo for combo in self.library.combos}
        self._training = self._held_out = self.library.combos
        if split == "scenarios":
            kept = set(list(self.library.envs)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
            self._held_out = [combo for combo in self._training if combo.env_id in kept]
            self._training = [combo for combo in self._training if combo.env_id not in kept]
        if not self._held_out or not self._training:
            raise ValueError(
                f"split = 'scenarios': {len(self.library.envs)} scenarios leave no episode to train on or to hold out; expected"
                f" {HELD_OUT_EVERY} or more, or split = 'all'"
            )

    # --------------------------------------------------------------------------------------- tasks

    def task(self, seed: int) -> Task:
        """Return the episode of ``seed``: seeds in a row take all episodes in turn, and then all
        with the other side."""
        combos, number = self._drawn(seed)
        combo = combos[number % len(combos)]
        codename = self.library.envs[combo.env_id].codename
        return Task(f"{self.name}-{seed}", source=codename, seed=seed)

    def initial(self, task: Task) -> State:
        combos, number = self._drawn(task.seed)
        sides = {"first": 0, "second": 1, "random": number // len(combos) % 2}
        return State(combos[number % len(combos)].pk, sides[self.side])

    def _drawn(self, seed: int) -> tuple[list[Combo], int]:
        if seed in HELD_OUT_SEEDS:
            return self._held_out, seed - HELD_OUT_SEEDS.start
        return self._training, seed

    # --------------------------------------------------------------------------------------- turns

    def prompt(self, task: Task, state: State) -> list[dict[str, str]]:
        return self._told(state, state.trained)

    def read(self, state: State, text: str) -> Action:
        """Return the action of the last JSON object in ``text``; its kind is one of the five, or
        "invalid"."""
        turn = conversation.read(text, 0)
        if turn is None:
            return Action("invalid", text)
        return Action(turn.kind, text, turn.argument)

    def replies(self, state: State) -> list[str]:
        """Return the replies without words: to do nothing and to leave."""
        return [json.dumps({"action_type": kind, "argument": ""}) for kind in ("none", "leave")]

    async def open(self, state: State, tools: Tools) -> State:
        """Let the partner begin if the trained side is the second. A partner that leaves at once
        has done nothing instead."""
        if state.trained == 0 or state.turns:
            return state
        first = await self._reply(state, tools)
        first = Turn(0, "none") if first.kind == "leave" else first
        return msgspec.structs.replace(state, turns=(first,))

    async def step(self, state: State, action: Action, tools: Tools) -> Transition:
        """Add the turn of the trained side and, unless it ended the conversation, the partner's. An
        invalid reply does nothing."""
        turns = (*state.turns, _turn(action, state.trained))
        if not self._over(turns):
            turns = (*turns, await self._reply(msgspec.structs.replace(state, turns=turns), tools))
        after, done = msgspec.structs.replace(state, turns=turns), self._over(turns)
        names = [agent.name for agent in self._cast(state)[1]]
        answers = turns[len(state.turns) + 1 :]
        lines = [conversation.line(turn, names[turn.side]) for turn in answers]
        lines += ["The conversation is over."] if done else []
        return Transition(after, "\n".join(lines), done)

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
        agents = [self.library.agents[key] for key in combo.agent_ids]
        return self.library.envs[combo.env_id], agents

    def _told(self, state: State, side: int) -> list[dict[str, str]]:
        scenario, agents = self._cast(state)
        me, other, viewer = agents[side], agents[1 - side], f"agent_{side}"
        level = scenario.relationship
        known = level if self.profiles == "relationship" else min(level, 1)
        names = [other.name if known else conversation.STRANGER] * 2
        names[side] = me.name
        text = conversation.INSTRUCTIONS.format(
            scenario=shown(scenario.scenario, viewer),
            relationship=conversation.RELATIONSHIPS[level],
            own=conversation.profile(me, 5, own=True),
            other=conversation.profile(other, known),
            goal=shown(scenario.agent_goals[side], viewer),
            limit=self.turns,
            split=SPLIT,
            history=conversation.history(state.turns, names) or "Nobody has done anything yet.",
            number=len(state.turns) + 1,
            name=me.name,
        )
        return [{"role": "user", "content": text}]

    # ------------------------------------------------------------------------------------- judging

    def concluded(
        self, task: Task, before: State, action: Action, after: State | None, step: int, budget: int
    ) -> JudgedTurn:
        """Return the whole conversation, both sides, as the outcome judge sees it
        (``JudgedTurn.state`` is a ``Conversation``)."""
        turns = after.turns if after else (*before.turns, _turn(action, before.trained))
        scenario, agents = self._cast(before)
        names = (agents[0].name, agents[1].name)
        told = [conversation.profile(agent, 5, own=True) for agent in agents]
        goals = [shown(goal, f"agent_{side}") for side, goal in enumerate(scenario.agent_goals)]
        whole = Conversation(
            scenario=shown(scenario.scenario, "environment"),
            names=names,
            profiles=(told[0], told[1]),
            goals=(goals[0], goals[1]),
            trained=before.trained,
            turns=turns,
            rules=scenario.rules,
        )
        turn = super().judged(task, before, action, step, budget)
        transcript = conversation.history(turns, names)
        return msgspec.structs.replace(
            turn, state=msgspec.to_builtins(whole), transcript=transcript
        )

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return the outcome, the dimensions that the judge gave, the number of the trained side's
        turns, and which of them were valid."""
        last = turns[-1]
        results = {name: [last[name]] for name in ("outcome", *DIMENSIONS) if name in last}
        valid = [turn["valid"] for turn in turns if "valid" in turn]
        return {"goal": []} | results | {"turns": [float(len(turns))], "valid": valid}


def _turn(action: Action, side: int) -> Turn:
    return Turn(side, action.kind, action.argument or "") if action.valid else Turn(side, "none")
