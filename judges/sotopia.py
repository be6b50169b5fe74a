"""SOTOPIA's judges of a finished conversation: a language model that scores both sides in seven
dimensions (methods.md 4.6), and rules for our own scenarios."""

import json
import math
import re
from typing import Any, Literal

import msgspec

from coppice.actors.environments.sotopia.environment import DIMENSIONS, Dialogue, history
from coppice.actors.environments.sotopia.scenarios import GoalCondition
from coppice.judges.base import RuleJudge
from coppice.judges.llm import ChatEndpoint, ChatJudge, fill, read_prompts, room
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Judgement

_FENCE = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL)
_AGENTS = ("agent_1", "agent_2")
_REASONS = r"[ !#-\[\]-~]"
"""A character of a constrained reasoning: ASCII without a quote or a backslash."""


def parse(reply: str, side: int) -> dict[str, float]:
    """Return the valid scores of one side by dimension; none for a reply that is no JSON object of
    both agents, or names a key twice. An entry is valid if it has a reasoning, then an integer
    score in its range."""
    fenced = _FENCE.fullmatch(reply)
    text = fenced[1] if fenced else reply
    try:
        scores = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        json.loads(text, object_pairs_hook=_distinct)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    entries = scores[_AGENTS[side]] if list(scores) == list(_AGENTS) else {}
    return {
        name: float(entries[name]["score"])
        for name, limits in DIMENSIONS.items()
        if _valid(entries.get(name), *limits)
    }


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object")


def _valid(entry: Any, least: int, most: int) -> bool:
    if not isinstance(entry, dict) or list(entry) != ["reasoning", "score"]:
        return False
    score = entry["score"]
    return isinstance(entry["reasoning"], str) and type(score) is int and least <= score <= most


def reply_form(max_tokens: int) -> str:
    """Return the form of a reply as a regular expression, see ``judges.slate.reply_form``."""

    def form(reason: str) -> str:
        entries = []
        for name, (least, most) in DIMENSIONS.items():
            scores = "|".join(map(str, range(least, most + 1)))
            entries.append(rf'"{name}": \{{"reasoning": "{reason}", "score": ({scores})\}}')
        sides = [rf'"{agent}": \{{{", ".join(entries)}\}}' for agent in _AGENTS]
        return rf"\{{{', '.join(sides)}\}}"

    around = len(re.sub(r"\([^)]*\)", "-10", form("")).replace("\\", "")) + 1
    most = room("sotopia", max_tokens, around, len(_AGENTS) * len(DIMENSIONS))
    return form(f"{_REASONS}{{1,{most}}}")


class SotopiaJudge(ChatJudge):
    """The LLM judge of whole conversations. outcome: the goal / 10 (the paper), or the mean of the
    seven scores (the released code). templates: {"episode": a path}. Columns are those of the
    trained side; "outcome" is invalid if a score from which it is made is."""

    name = "sotopia"
    columns = ("outcome", *DIMENSIONS)
    limits = (-10.0, 10.0)
    environments = ("sotopia",)
    batch = 32

    def __init__(
        self,
        endpoint: ChatEndpoint,
        outcome: Literal["goal", "mean"] = "goal",
        templates: dict[str, str] | None = None,
    ):
        self.template = read_prompts("sotopia", {"episode": "sotopia.txt"}, templates)["episode"]
        super().__init__(endpoint, reply_form)
        reply_form(endpoint.max_tokens)  # refuses a reply that would be cut, constrained or not
        self.outcome, self.concurrency = outcome, endpoint.concurrency

    def prompt(self, whole: Dialogue) -> str:
        """Return the judge's prompt, without turns in which nothing happened, as in SOTOPIA."""
        pairs = {"name": whole.names, "profile": whole.profiles, "goal": whole.goals}
        values = {f"{key}_{side}": pair[side - 1] for key, pair in pairs.items() for side in (1, 2)}
        acted = [turn for turn in whole.turns if turn.kind != "none"]
        told = history(acted, whole.names) or "Nothing happened."
        return fill(self.template, scenario=whole.scenario, history=told, **values)

    async def judge(self, turn: JudgedTurn) -> Judgement:
        whole = msgspec.convert(turn.state, Dialogue)
        reply, failure = await self.reply(self.prompt(whole))
        scores = parse(reply, whole.trained)
        if self.outcome == "goal" and "goal" in scores:
            scores["outcome"] = scores["goal"] / 10
        elif self.outcome == "mean" and len(scores) == len(DIMENSIONS):
            scores["outcome"] = math.fsum(scores.values()) / len(DIMENSIONS)
        invalid = [name for name in self.columns if name not in scores]
        return Judgement(scores, invalid, failure or reply.strip())


def holds(condition: GoalCondition, own: list[str], other: list[str]) -> bool:
    """Return whether a condition of an agent's goal holds, given the words that each side said, in
    order."""
    whose = {"self": own, "partner": other, "each": own + other}[condition.by]
    if pattern := condition.says or condition.never:
        said = any(re.search(pattern, words, re.IGNORECASE) for words in whose)
        return said if condition.says else not said
    mine, theirs = (_last_number(condition.agreed, said) for said in (own, other))
    return mine is not None and mine == theirs and condition.least <= mine <= condition.most


def _last_number(pattern: str, said: list[str]) -> float | None:
    found = [n for words in said for n in re.findall(pattern, words, re.IGNORECASE)]
    try:
        return float(found[-1].replace(",", "")) if found else None
    except ValueError:
        return None


class SotopiaRules(RuleJudge):
    """The rule judge of our own scenarios. It matches words, also where they were quoted or denied.
    Columns of the trained side: goal (10 if all its conditions hold, else 0), outcome (goal / 10)
    and, for scenarios whose rules know the words, secret (-10 if the agent revealed it, else 0)."""

    name = "sotopia_rules"
    columns = ("outcome", "goal", "secret")
    limits = (-10.0, 10.0)
    environments = ("sotopia",)

    def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of a conversation. Raises DataFault for a scenario without rules."""
        whole = msgspec.convert(turn.state, Dialogue)
        if whole.rules is None:
            raise DataFault("judge sotopia_rules: the scenario has no rules to check; use sotopia")
        rules, side = whole.rules[whole.trained], whole.trained
        spoken = [turn for turn in whole.turns if turn.kind == "speak"]
        own = [turn.argument for turn in spoken if turn.side == side]
        other = [turn.argument for turn in spoken if turn.side != side]
        results = {condition: holds(condition, own, other) for condition in rules.goal}
        goal = 10.0 if all(results.values()) else 0.0
        scores = {"outcome": goal / 10, "goal": goal}
        if rules.secret:
            revealed = any(re.search(rules.secret, words, re.IGNORECASE) for words in own)
            scores["secret"] = -10.0 if revealed else 0.0
        met = [f"{'holds' if held else 'fails'}: {c}" for c, held in results.items()]
        return Judgement(scores, explanation="\n".join(met))
