"""SOTOPIA: two agents with private goals talk to each other, and one of them is trained
(docs/sotopia.md). The partner replies while the environment steps, so its words are observations:
no loss is taken on their tokens. A judge gives the outcome of the whole conversation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.actors.environments.sotopia.scenarios import Agent, Combo, Rules, Scenario, load, shown
from coppice.common.numbers import Count
from coppice.wire.messages import JudgedTurn

HELD_OUT_EVERY = 4
"""Every fourth scenario is held out, so that held-out conversations are about goals that training
never sees."""
TRIES = 2
"""How often the partner is asked until its reply can be read. After that its turn counts as "none".
"""
INSTRUCTIONS = (Path(__file__).parent / "prompt.txt").read_text().strip()
"""What a side is told. The text before {split} is the same in all turns of a conversation."""
KINDS = ("none", "speak", "non-verbal communication", "action", "leave")
DIMENSIONS = {
    "believability": (0, 10),
    "relationship": (-5, 5),
    "knowledge": (0, 10),
    "secret": (-10, 0),
    "social_rules": (-10, 0),
    "financial_and_material_benefits": (-5, 5),
    "goal": (0, 10),
}
"""The dimensions by which a side is judged, each with its least and its greatest score."""
QUIET = 3
"""A conversation ends after three turns in a row in which nobody did anything."""
RELATIONSHIPS = (
    "You have never met before.",
    "You know each other by name only.",
    "You are acquainted with each other.",
    "You are friends.",
    "You are in a romantic relationship.",
    "You are family.",
)


class SotopiaTurn(msgspec.Struct, frozen=True):
    """One turn. side: 0 or 1. argument: what was said or done, "" for none and leave."""

    side: int
    kind: str
    argument: str = ""


class Dialogue(msgspec.Struct, frozen=True):
    """A finished conversation as a judge sees it. Pairs are in the order of the sides; trained: the
    side that is judged."""

    scenario: str
    names: tuple[str, str]
    profiles: tuple[str, str]
    goals: tuple[str, str]
    trained: int
    turns: tuple[SotopiaTurn, ...]
    rules: tuple[Rules, Rules] | None = None


class SotopiaState(msgspec.Struct, frozen=True):
    """A conversation. combo: the key of the scenario with its agents. trained: the side that the
    policy plays for training."""

    combo: str
    trained: int
    turns: tuple[SotopiaTurn, ...] = ()


class Sotopia(Environment):
    """The rules of a conversation.

    scenarios: a path for ``scenarios.load``, "" for our own. partner: "policy" (self-chat) or a
    served speaker, whose replies have at most partner_tokens tokens. side: which agent is trained;
    the first one begins. turns: of both sides together. judge: the judge of outcomes. profiles: a
    side knows of the other what their relationship tells, or at most the name ("hidden", as in
    SOTOPIA's current release). split: whether every fourth scenario is held out, or none ("all").
    """

    name = "sotopia"
    headline = "goal"

    def __init__(
        self,
        scenarios: str = "",
        partner: str = base.POLICY,
        side: Literal["first", "second", "random"] = "random",
        turns: Count = 20,
        partner_tokens: Count = 512,
        judge: str = "sotopia_rules",
        profiles: Literal["relationship", "hidden"] = "relationship",
        split: Literal["scenarios", "all"] = "scenarios",
    ):
        self.library = load(scenarios)
        if turns < 2:
            raise ValueError(f"turns = {turns}: expected 2 or more, because two agents take turns")
        unruled = [key for key, scenario in self.library.envs.items() if scenario.rules is None]
        if judge == "sotopia_rules" and unruled:
            fault = f"scenario {unruled[0]!r} has no rules to check"
            raise ValueError(f"judge = 'sotopia_rules': {fault}; use judge = 'sotopia'")
        self.partner, self.partner_tokens, self.speakers = partner, partner_tokens, (partner,)
        self.side, self.turns, self.outcome_judge = side, turns, judge
        self.profiles = profiles
        self._combos = {combo.pk: combo for combo in self.library.combos}
        self._training = self._held_out = self.library.combos
        if split == "scenarios":
            kept = set(list(self.library.envs)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
            self._held_out = [combo for combo in self._training if combo.env_id in kept]
            self._training = [combo for combo in self._training if combo.env_id not in kept]
        if not self._held_out or not self._training:
            raise ValueError(
                f"split = 'scenarios': {len(self.library.envs)} scenarios leave no episode to train"
                f" on or to hold out; expected {HELD_OUT_EVERY} or more, or split = 'all'"
            )

    # --------------------------------------------------------------------------------------- tasks

    def task(self, seed: int) -> Task:
        """Return the episode of ``seed``: seeds in a row take all episodes in turn, and then all
        with the other side."""
        codename = self.library.envs[self._drawn(seed)[0].env_id].codename
        return Task(f"{self.name}-{seed}", source=codename, seed=seed)

    def initial(self, task: Task) -> SotopiaState:
        combo, lap = self._drawn(task.seed)
        return SotopiaState(combo.pk, {"first": 0, "second": 1, "random": lap % 2}[self.side])

    def _drawn(self, seed: int) -> tuple[Combo, int]:
        held_out = seed in base.HELD_OUT_SEEDS
        combos = self._held_out if held_out else self._training
        start = base.HELD_OUT_SEEDS.start if held_out else 0
        lap, place = divmod(seed - start, len(combos))
        return combos[place], lap

    # --------------------------------------------------------------------------------------- turns

    def prompt(self, task: Task, state: SotopiaState) -> list[dict[str, str]]:
        return self._told(state, state.trained)

    def read(self, state: SotopiaState, text: str) -> Action:
        return read_turn(text)

    def replies(self, state: SotopiaState) -> list[str]:
        """Return the replies without words: to do nothing and to leave."""
        return [json.dumps({"action_type": kind, "argument": ""}) for kind in ("none", "leave")]

    async def open(self, state: SotopiaState, tools: Tools) -> SotopiaState:
        """Let the partner begin if the trained side is the second. A partner that leaves at once
        has done nothing instead."""
        if state.trained == 0 or state.turns:
            return state
        first = await self._reply(state, tools)
        first = SotopiaTurn(0, "none") if first.kind == "leave" else first
        return msgspec.structs.replace(state, turns=(first,))

    async def step(self, state: SotopiaState, action: Action, tools: Tools) -> Transition:
        """Add the turn of the trained side and, unless it ended the conversation, the partner's. An
        invalid reply does nothing."""
        turns, lines = (*state.turns, _turn(action, state.trained)), list[str]()
        if not self.over(turns):
            answer = await self._reply(msgspec.structs.replace(state, turns=turns), tools)
            turns = (*turns, answer)
            lines.append(line(answer, self._cast(state)[1][answer.side].name))
        after, done = msgspec.structs.replace(state, turns=turns), self.over(turns)
        lines += ["The conversation is over."] * done
        return Transition(after, "\n".join(lines), done)

    async def _reply(self, state: SotopiaState, tools: Tools) -> SotopiaTurn:
        side = 1 - state.trained
        for _ in range(TRIES):
            text = await tools.say(self.partner, self._told(state, side), self.partner_tokens, [])
            if (action := self.read(state, text)).valid:
                return _turn(action, side)
        return SotopiaTurn(side, "none")

    def over(self, turns: Sequence[SotopiaTurn]) -> bool:
        """Return whether the conversation has ended: at the limit, when a side left, or after
        ``QUIET`` turns of nothing."""
        quiet = len(turns) >= QUIET and all(turn.kind == "none" for turn in turns[-QUIET:])
        last = turns[-1] if turns else SotopiaTurn(0, "none")
        return len(turns) >= self.turns or last.kind == "leave" or quiet

    def _cast(self, state: SotopiaState) -> tuple[Scenario, list[Agent]]:
        combo = self._combos[state.combo]
        agents = [self.library.agents[key] for key in combo.agent_ids]
        return self.library.envs[combo.env_id], agents

    def _told(self, state: SotopiaState, side: int) -> list[dict[str, str]]:
        scenario, agents = self._cast(state)
        me, other, viewer = agents[side], agents[1 - side], f"agent_{side}"
        level = scenario.relationship
        familiar = level if self.profiles == "relationship" else min(level, 1)
        names = [other.name if familiar else "the other person"] * 2
        names[side] = me.name
        text = INSTRUCTIONS.format(
            scenario=shown(scenario.scenario, viewer),
            relationship=RELATIONSHIPS[level],
            own=profile(me, 5, own=True),
            other=profile(other, familiar),
            goal=shown(scenario.agent_goals[side], viewer),
            limit=self.turns,
            split=base.SPLIT,
            history=history(state.turns, names) or "Nobody has done anything yet.",
            number=len(state.turns) + 1,
            name=me.name,
        )
        return [{"role": "user", "content": text}]

    # ------------------------------------------------------------------------------------- judging

    def concluded(
        self, task: Task, before: SotopiaState, action: Action, after: SotopiaState | None,
        step: int, budget: int,
    ) -> JudgedTurn:  # fmt: skip
        """Return the whole conversation, both sides, as the outcome judge sees it
        (``JudgedTurn.state`` is a ``Dialogue``)."""
        turns = after.turns if after else (*before.turns, _turn(action, before.trained))
        scenario, agents = self._cast(before)
        names, goals = (agents[0].name, agents[1].name), scenario.agent_goals
        whole = Dialogue(
            scenario=shown(scenario.scenario, "environment"),
            names=names,
            profiles=(profile(agents[0], 5, own=True), profile(agents[1], 5, own=True)),
            goals=(shown(goals[0], "agent_0"), shown(goals[1], "agent_1")),
            trained=before.trained,
            turns=turns,
            rules=scenario.rules,
        )
        turn, state = super().judged(task, before, action, step, budget), msgspec.to_builtins(whole)
        return msgspec.structs.replace(turn, state=state, transcript=history(turns, names))

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return the outcome, the dimensions that the judge gave, the number of the trained side's
        turns, and which of them were valid."""
        last = turns[-1]
        results = {name: [last[name]] for name in ("outcome", *DIMENSIONS) if name in last}
        valid = [turn["valid"] for turn in turns if "valid" in turn]
        return {"goal": []} | results | {"turns": [float(len(turns))], "valid": valid}


def _turn(action: Action, side: int) -> SotopiaTurn:
    return SotopiaTurn(side, action.kind if action.valid else "none", action.argument or "")


# ------------------------------------------------------------------------- turns and profiles


def read_turn(text: str) -> Action:
    """Return the turn that the last JSON object of a reply describes, "invalid" for none.

    A kind is written exactly as in ``KINDS``. The three kinds with words need some; other keys,
    such as ``to``, are ignored.
    """
    decoder, last, place = json.JSONDecoder(), None, text.find("{")
    while place >= 0:
        try:
            last, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    if not isinstance(last, dict):
        return Action("invalid", text)
    kind, argument = last.get("action_type"), last.get("argument", "")
    if kind not in KINDS or not isinstance(argument, str):
        return Action("invalid", text)
    if kind in ("none", "leave"):
        return Action(kind, text, "")
    # half of a surrogate pair is no text, and a line break could imitate another turn
    words = " ".join(argument.encode(errors="ignore").decode().split())
    return Action(kind, text, words) if words else Action("invalid", text)


def line(turn: SotopiaTurn, name: str) -> str:
    """Return the turn in the words of SOTOPIA's history."""
    if turn.kind == "speak":
        return f'{name} said: "{turn.argument}"'
    if turn.kind in ("none", "leave"):
        return f"{name} {'did nothing' if turn.kind == 'none' else 'left the conversation'}"
    return f"{name} [{turn.kind}] {turn.argument}"


def history(turns: Sequence[SotopiaTurn], names: Sequence[str]) -> str:
    """Return the turns, one per line, numbered from 1."""
    lines = (f"Turn #{n}: {line(turn, names[turn.side])}" for n, turn in enumerate(turns, 1))
    return "\n".join(lines)


def profile(agent: Agent, relationship: int, own: bool = False) -> str:
    """Return what somebody in this relationship knows of an agent. own: the agent itself, who knows
    everything and has a secret."""
    parts: list[str] = []
    if relationship >= 1:
        pronoun = f" ({agent.gender_pronoun})" if agent.gender_pronoun else ""
        parts.append(f"{agent.name}{pronoun}.")
    if relationship >= 2:
        parts += [f"Age {agent.age}, {agent.occupation}.", agent.public_info]
    if relationship >= 3:
        style = agent.decision_making_style
        parts.append(agent.personality_and_values)
        parts.append(f"Makes decisions in this way: {style}." if style else "")
    if own and agent.secret:
        parts.append(f"Secret, which nobody else knows: {agent.secret}")
    return " ".join(part for part in parts if part) or "You know nothing about this person."
