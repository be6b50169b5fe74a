"""Exact match and F1 of question answering, as methods.md 1.7 defines them."""

import re
import string
from collections import Counter

from coppice.judges.base import RuleJudge
from coppice.wire.messages import JudgedTurn, Judgement

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
"""A block begins at the last opening tag before its closing tag."""
_ANSWER_AS_PUBLISHED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def normalize(text: str) -> str:
    """Lower the case, delete ASCII punctuation, then articles, and collapse spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: list[str]) -> float:
    """Return 1.0 if the normalised prediction equals any normalised gold, else 0.0."""
    return float(normalize(prediction) in {normalize(gold) for gold in golds})


def f1(prediction: str, golds: list[str]) -> float:
    """Return the best token F1 of the normalised prediction against the golds, in [0, 1]."""
    words = normalize(prediction).split()
    return max((_token_f1(words, normalize(gold).split()) for gold in golds), default=0.0)


def _token_f1(prediction: list[str], gold: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(prediction), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def extract_answer(text: str, least_blocks: int = 1) -> str | None:
    """Return the text of the last complete answer block, or None. least_blocks=2 is the scorer of
    Search-R1 and PPR, which reads an example block of the prompt too. As published, its blocks
    begin at the first opening tag."""
    blocks = (_ANSWER if least_blocks == 1 else _ANSWER_AS_PUBLISHED).findall(text)
    return blocks[-1].strip() if len(blocks) >= least_blocks else None


class ExactMatch(RuleJudge):
    """Scores the answer of a turn. Columns: outcome (exact match) and f1. A turn without an answer
    scores 0 (methods.md 1.7)."""

    name = "exact_match"
    columns = ("outcome", "f1")
    limits = (0.0, 1.0)

    def judge(self, turn: JudgedTurn) -> Judgement:
        # None means no answer block. Only "", an empty block, can equal a gold that consists of
        # articles and punctuation.
        if (answer := turn.answer) is None:
            return Judgement({"outcome": 0.0, "f1": 0.0})
        return Judgement({"outcome": exact_match(answer, turn.golds), "f1": f1(answer, turn.golds)})
