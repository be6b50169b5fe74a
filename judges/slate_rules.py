"""SLATE's three components as rules, without a model (methods.md 1.6 b), and a variant that knows
the supporting passages.

query = "format":   a query scores 0, or -1 if it is empty or was asked before. query = "evidence":
a query scores +1 if it would find the next supporting passage that was not shown yet, 0 if it names
only a part of what finds the passage, and -1 if it names nothing of it, is empty or was asked
before. A passage "Title / Field: value" is found by all words of its field together with its title
or its value. A query with a tag scores -1, because an unpunished policy drifts to queries like
"capital of Peru </capital of Peru" and from there to actions that never close. answer: +1 for an
exact match, else -1; with "partial", a token F1 of at least 0.5 scores 0. think: 0, or -1 if it is
empty.
"""

from typing import Literal

from coppice.judges.base import RuleJudge
from coppice.judges.evidence import finds, shown
from coppice.judges.exact_match import exact_match, f1, normalize
from coppice.wire.messages import JudgedTurn, Judgement

_HALF = 0.5


class SlateRules(RuleJudge):
    """Columns think and query for a search, think and answer for an answer."""

    name = "slate_rules"
    columns = ("think", "query", "answer")

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
        return 0.0 if self.answer == "partial" and f1(answer, golds) >= _HALF else -1.0

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
