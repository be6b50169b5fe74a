"""Searches for whole runs with an untrained policy, and a judge of theirs."""

import zlib

from coppice.actors.environments.base import Action
from coppice.actors.environments.search_qa.environment import SearchQA, SearchState
from coppice.judges.base import RuleJudge
from coppice.wire.messages import JudgedTurn, Judgement

SEARCHES = 2


class AnySearch(SearchQA):
    """Every text asks the question itself of the retriever, and from the third turn on answers."""

    def read(self, state: SearchState | None, text: str) -> Action:
        if state is not None and len(state.steps) < SEARCHES:
            return Action("search", text, state.question, think="")
        return Action("answer", text, text, think="")


class CoinSearch(AnySearch):
    """As AnySearch, judged by Coin, so that every method has something to learn."""

    outcome_judge = "coin"


class Coin(RuleJudge):
    """Right are the answers whose checksum is even: about half of a random policy's."""

    name = "coin"
    columns = ("outcome", "f1")

    def judge(self, turn: JudgedTurn) -> Judgement:
        right = turn.answer is not None and zlib.crc32(turn.answer.encode()) % 2 == 0
        return Judgement(dict.fromkeys(self.columns, float(right)))
