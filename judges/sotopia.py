"""SOTOPIA's judge: a language model scores both sides of a finished conversation in seven
dimensions (methods.md 4.6).

The reply is one JSON object with a reasoning before each score. A dimension whose entry is missing,
has other keys or another order, is no integer or is out of its range is invalid; a reply that is no
such object makes every column invalid. Nothing is guessed or repaired.
"""

import math
import re
from typing import Any, Literal

import msgspec

from coppice.actors.environments.sotopia.conversation import DIMENSIONS, Conversation, history
from coppice.judges.llm import ChatEndpoint, ChatJudge
from coppice.judges.templates import fill, read
from coppice.wire.messages import JudgedTurn, Judgement

_FENCE = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL)
_AGENTS = ("agent_1", "agent_2")
_REASONS = r"[ !#-\[\]-~]"
"""A character of a constrained reasoning: ASCII without a quote or a backslash, so that it takes at
most one token."""
_FEWEST = 16
"""The least room, in characters, that each constrained reasoning needs."""


def parse(reply: str, side: int) -> dict[str, float]:
    """Return the valid scores of one side by dimension; none for a reply that is no object of both
    agents."""
    fenced = _FENCE.fullmatch(reply)
    try:
        scores = msgspec.json.decode(fenced[1] if fenced else reply, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, RecursionError):
        return {}
    entries = scores[_AGENTS[side]] if list(scores) == list(_AGENTS) else {}
    return {
        name: float(entries[name]["score"])
        for name in DIMENSIONS
        if _valid(name, entries.get(name))
    }


def _valid(name: str, entry: Any) -> bool:
    if not isinstance(entry, dict) or list(entry) != ["reasoning", "score"]:
        return False
    (least, most), score = DIMENSIONS[name], entry["score"]
    return isinstance(entry["reasoning"], str) and type(score) is int and least <= score <= most


def reply_form(max_tokens: int) -> str:
    """Return the form of a reply as a regular expression. Every match fits in ``max_tokens``.
    Raises ValueError if they are too few."""

    def form(reason: str) -> str:
        entries = [
            rf'"{name}": \{{"reasoning": "{reason}", "score": ({"|".join(str(n) for n in range(least, most + 1))})\}}'
            for name, (least, most) in DIMENSIONS.items()
        ]
        return (
            r"\{"
            + ", ".join(rf'"{agent}": \{{{", ".join(entries)}\}}' for agent in _AGENTS)
            + r"\}"
        )

    reasons = len(_AGENTS) * len(DIMENSIONS)
    around = len(re.sub(r"\([^)]*\)", "-10", form("")).replace("\\", "")) + 1
    room = (max_tokens - around) // reasons
    if room < _FEWEST:
        raise ValueError(
            f"judge sotopia: max_tokens {max_tokens}: a constrained reply needs {around + reasons * _FEWEST} or more"
        )
    return form(f"{_REASONS}{{1,{room}}}")


class SotopiaJudge(ChatJudge):
    """The LLM judge of whole conversations. outcome: the goal / 10 (the paper), or the mean of the
    seven scores (the released code).

    templates: {"episode": a path} replaces the built-in template. Columns are those of the trained
    side; "outcome" is invalid if a score from which it is made is.
    """

    name = "sotopia"
    columns = ("outcome", *DIMENSIONS)
    environments = ("sotopia",)
    batch = 32

    def __init__(
        self,
        endpoint: ChatEndpoint,
        outcome: Literal["goal", "mean"] = "goal",
        templates: dict[str, str] | None = None,
    ):
        self.template = read("sotopia", {"episode": "sotopia.txt"}, templates)["episode"]
        super().__init__(endpoint, reply_form)
        self.outcome, self.concurrency = outcome, endpoint.concurrency

    def prompt(self, whole: Conversation) -> str:
        """Return the judge's prompt. Turns in which nothing happened are left out of the history,
        as in SOTOPIA."""
        pairs = {"name": whole.names, "profile": whole.profiles, "goal": whole.goals}
        values = {f"{key}_{side}": pair[side - 1] for key, pair in pairs.items() for side in (1, 2)}
        told = history([turn for turn in whole.turns if turn.kind != "none"], whole.names)
        return fill(
            self.template, scenario=whole.scenario, history=told or "Nothing happened.", **values
        )

    async def judge(self, turn: JudgedTurn) -> Judgement:
        whole = msgspec.convert(turn.state, Conversation)
        reply, failure = await self.client.reply_or_failure(self.prompt(whole), self.form)
        scores = parse(reply, whole.trained)
        self.counts["judged"] += 1
        if len(scores) < len(DIMENSIONS):
            self.counts["failed" if failure else "unparsed"] += 1
        if self.outcome == "goal" and "goal" in scores:
            scores["outcome"] = scores["goal"] / 10
        elif self.outcome == "mean" and len(scores) == len(DIMENSIONS):
            scores["outcome"] = math.fsum(scores.values()) / len(DIMENSIONS)
        return Judgement(
            scores, [name for name in self.columns if name not in scores], failure or reply.strip()
        )
