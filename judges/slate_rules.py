"""SLATE's three components by rule, without a model (methods.md 1.6 b), and a variant that knows the supporting passages.

query = "format":   a query scores 0, or -1 when empty or asked before.
query = "evidence": a query scores +1 when it would find the next supporting passage that has not been shown yet, 0 when
it names only part of what finds it, -1 when it names nothing of it, is empty or was asked before. What finds a passage
"Title / Field: value" is its title with its field, or its field with its value. A query with a tag in it scores -1: unpunished, a
policy drifts to "capital of Peru </capital of Peru", and from there to actions that never close.
answer: +1 for an exact match, else -1 ("strict") or, with "partial", 0 from a token F1 of 0.5.
think: 0, or -1 when empty.
"""

from typing import Literal

from judges.base import Judge
from judges.evidence import finds, shown
from judges.exact_match import exact_match, f1, normalize
from wire.messages import JudgedTurn, Judgement

_HALF = 0.5


class SlateRules(Judge):
    """Columns think, query, answer: think + query for a search, think + answer for an answer."""

    name = "slate_rules"
    columns = ("think", "query", "answer")
    concurrency = 256
    batch = 256

    def __init__(
        self, query: Literal["format", "evidence"] = "evidence", answer: Literal["strict", "partial"] = "strict"
    ):
        if query not in ("format", "evidence") or answer not in ("strict", "partial"):
            raise ValueError(
                f"slate_rules: query={query!r}, answer={answer!r}: expected format|evidence, strict|partial"
            )
        self.query, self.answer = query, answer

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return [self._judge(turn) for turn in turns]

    def _judge(self, turn: JudgedTurn) -> Judgement:
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
        return -1.0 if missing is None else finds(query, missing)
