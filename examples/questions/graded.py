from coppice.judges.base import Judge
from coppice.judges.exact_match import f1
from coppice.wire.messages import JudgedTurn, Judgement


class Graded(Judge):
    name = "graded"
    columns = ("think", "query", "answer")
    environments = ("search_qa",)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return [self.one(turn) for turn in turns]

    def one(self, turn: JudgedTurn) -> Judgement:
        if turn.answer is not None:
            return Judgement({"think": 0.0, "answer": 2 * f1(turn.answer, turn.golds) - 1})
        return Judgement({"think": 0.0, "query": -1.0 if turn.query in turn.past_queries else 0.0})
