"""SLATE's ablation (c): truncated sampling with exact match alone (methods.md 1.6).

An answer scores 1 for an exact match and 0 otherwise; a search scores 0. It must be used with
``scheduler.strategy_options = { bonus = 0 }``. Ablation (b), rule rewards on the judge's scale, is
``slate_rules`` with ``query = "format"``.
"""

from coppice.judges.base import RuleJudge
from coppice.judges.exact_match import exact_match
from coppice.wire.messages import JudgedTurn, Judgement


class SlateEm(RuleJudge):
    """Columns think (always 0), query (always 0) and answer (exact match)."""

    name = "slate_em"
    columns = ("think", "query", "answer")

    def judge(self, turn: JudgedTurn) -> Judgement:
        if turn.answer is None:
            return Judgement({"think": 0.0, "query": 0.0})
        return Judgement({"think": 0.0, "answer": exact_match(turn.answer, turn.golds)})
