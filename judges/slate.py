"""SLATE's judges: two ternary scores per turn from a language model (methods.md 1.3), and its
ablations by rules (methods.md 1.6).

The built-in prompts have the same order: the rules of all three components, the context, then the
graded text. A server that caches prefixes computes the rules once per run, each addition to the
context once, and per prompt only the graded text.
"""

import asyncio
import re
from typing import Literal

from coppice.judges.base import RuleJudge
from coppice.judges.evidence import finds, shown
from coppice.judges.exact_match import exact_match, f1, normalize
from coppice.judges.llm import ChatEndpoint, ChatJudge, fill, read_prompts, room
from coppice.wire.messages import JudgedTurn, Judgement

_SCORE = re.compile(r"<score>((?:(?!<score>).)*?)</score>", re.DOTALL)
_TERNARY = re.compile(r"\s*([+-]?1|[+-]?0)\s*")
_REASONS = r"[\n -;=-~]"
"""A character of a constrained explanation: ASCII, at most one token each, but not "<"."""
_AROUND = len("<explanation></explanation>\n<score>+1</score>") + 1
"""The most tokens of a constrained reply besides its explanation, including the end token."""


def parse_score(reply: str) -> float | None:
    """Return -1, 0 or 1 from the last score block of a reply, None when there is no block or it has
    any other content."""
    blocks = _SCORE.findall(reply)
    score = _TERNARY.fullmatch(blocks[-1]) if blocks else None
    return float(score[1]) + 0.0 if score else None


def reply_form(max_tokens: int) -> str:
    """Return the form of a reply as a regular expression. Every match fits in ``max_tokens``.
    Raises ValueError if they are too few."""
    reasons = f"{_REASONS}{{1,{room('slate', max_tokens, _AROUND)}}}"
    return rf"<explanation>{reasons}</explanation>\n?<score>(\+1|0|-1)</score>"


class Slate(ChatJudge):
    """The LLM judge: a search is judged by its think and its query, an answer by its think and its
    answer. A reply is invalid unless its last score block is exactly -1, 0 or +1. templates: by
    component name, paths that replace the built-in templates."""

    name = "slate"
    columns = ("think", "query", "answer")
    limits = (-1.0, 1.0)

    def __init__(self, endpoint: ChatEndpoint, templates: dict[str, str] | None = None):
        built_in = {column: f"slate_{column}.txt" for column in self.columns}
        self.templates = read_prompts("slate", built_in, templates)
        super().__init__(endpoint, reply_form)

    def prompts(self, turn: JudgedTurn) -> dict[str, str]:
        """Return the two prompts of a turn, by column."""
        if turn.answer is not None:
            column = "answer"
            values = {"ground_truth": "; ".join(turn.golds), "predicted_answer": turn.answer}
        else:
            column, values = "query", {"query": turn.query or "None"}
        values |= {"context": turn.context or "None", "thinking": turn.think or "None"}
        return {part: fill(self.templates[part], **values) for part in ("think", column)}

    async def judge(self, turn: JudgedTurn) -> Judgement:
        prompts = self.prompts(turn)
        replies = await asyncio.gather(*map(self.reply, prompts.values()))
        scores, invalid, notes = {}, [], []
        for column, (reply, failure) in zip(prompts, replies, strict=True):
            value = parse_score(reply)
            if value is None:
                invalid.append(column)
            else:
                scores[column] = value
            notes.append(f"[{column}] {failure or reply.strip()}")
        return Judgement(scores, invalid, "\n".join(notes))


class SlateRules(RuleJudge):
    """SLATE's components as rules (methods.md 1.6 b), and a variant that knows the supporting
    passages. Columns think and query for a search, think and answer for an answer.

    query: "format": 0, or -1 for a query that is empty or was asked before. "evidence": as
    ``judges.evidence.finds`` scores it for the next supporting passage that was not shown yet. A
    query with a tag scores -1, because an unpunished policy drifts to queries like "capital of Peru
    </capital of Peru" and from there to actions that never close. answer: +1 for an exact match,
    else -1; with "partial", a token F1 of at least 0.5 scores 0. The think scores 0, or -1 if it is
    empty."""

    name = "slate_rules"
    columns = ("think", "query", "answer")
    limits = (-1.0, 1.0)

    def __init__(
        self,
        query: Literal["format", "evidence"] = "evidence",
        answer: Literal["strict", "partial"] = "strict",
    ):
        self.query, self.answer = query, answer

    def judge(self, turn: JudgedTurn) -> Judgement:
        scores = {"think": 0.0 if normalize(turn.think or "") else -1.0}
        if turn.answer is not None:
            scores["answer"] = self._answer(turn.answer, turn.golds)
        else:
            scores["query"] = self._query(turn)
        return Judgement(scores)

    def _answer(self, answer: str, golds: list[str]) -> float:
        if exact_match(answer, golds):
            return 1.0
        return 0.0 if self.answer == "partial" and f1(answer, golds) >= 0.5 else -1.0

    def _query(self, turn: JudgedTurn) -> float:
        query = normalize(turn.query or "")
        if not query or query in {normalize(past) for past in turn.past_queries}:
            return -1.0
        if self.query == "format" or not turn.evidence:
            return 0.0
        if "<" in (turn.query or ""):
            return -1.0
        missing = next((e for e in turn.evidence if not shown(e, turn.past_observations)), None)
        return -1.0 if missing is None else finds(turn.query or "", missing, turn.question)


class SlateEm(RuleJudge):
    """Ablation (c), truncated sampling with exact match alone (methods.md 1.6): an answer scores 1
    for an exact match, everything else 0. Use it with ``scheduler.strategy_options = { bonus = 0
    }``."""

    name = "slate_em"
    columns = ("think", "query", "answer")
    limits = (-1.0, 1.0)

    def judge(self, turn: JudgedTurn) -> Judgement:
        if turn.answer is None:
            return Judgement({"think": 0.0, "query": 0.0})
        return Judgement({"think": 0.0, "answer": exact_match(turn.answer, turn.golds)})
