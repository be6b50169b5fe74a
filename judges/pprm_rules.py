"""PPR's three principles as rules, without a model. The score and the explanation have the form of
the PPRM's.

Each principle gives 0 to 2 points: the information is used, the query is good, and the decision for
or against a search is right. An answer has no query, so it can reach 4 points and a search 6. A
turn that cannot be read, or has text outside the four tags, gets 0 of 6.

view = "evidence": the judge knows the supporting passages and which of them were shown before. The
information is the last of these: 2 if the think names at least half of what the question did not
say, 1 for any of it. If none was shown, it is the question: 2 for half of its words, 1 for any.

view = "retrieval", also without supporting passages: the judge knows the gold answers and what the
searches returned. The information is what came back: 2 with a gold answer, 1 for a new passage with
a word of the question; of an answer, 2 if it stands in an earlier observation.
"""

import re
from typing import Literal

from coppice.judges.base import RuleJudge
from coppice.judges.evidence import content_words, finds, holds, parts, passages, said, shown
from coppice.judges.exact_match import normalize
from coppice.wire.messages import JudgedTurn, Judgement

_BLOCK = re.compile(r"<(think|search|information|answer)>.*?</\1>", re.DOTALL)
_EACH = 2
_REASONS = {
    "Information": ("it is not used", "it is used in part", "it is used"),
    "Query": (
        "it asks for nothing that helps",
        "it asks for a part",
        "it asks for what is missing",
    ),
    "Decision": ("it is wrong", "it is right, but the query does not serve it", "it is right"),
}
"""Why a principle has 0, 1 or 2 points."""


class PprmRules(RuleJudge):
    """Column process, S/M. The explanation has the form in which a PPRM writes it."""

    name = "pprm_rules"
    columns = ("process",)
    limits = (0.0, 1.0)

    def __init__(self, view: Literal["evidence", "retrieval"] = "evidence"):
        self.view = view

    def judge(self, turn: JudgedTurn) -> Judgement:
        outside = _BLOCK.sub("", turn.response).strip()
        if outside or (turn.query is None and turn.answer is None):
            analysis = "Format: a turn is a thought, then one search or answer, and nothing else."
            return _judgement(0, 3 * _EACH, analysis)
        knows_passages = self.view == "evidence" and turn.evidence
        points = _by_evidence(turn) if knows_passages else _by_retrieval(turn)
        analysis = " ".join(
            f"{name}: {_REASONS[name][reached]} ({reached} of {_EACH})."
            for name, reached in points.items()
        )
        return _judgement(sum(points.values()), _EACH * len(points), analysis)


def _judgement(reached: int, most: int, analysis: str) -> Judgement:
    text = f"Analysis: {analysis}\nScores: <final_score>{reached},{most}</final_score>"
    return Judgement({"process": reached / most}, explanation=text)


def _points(information: int, query: int | None, missing: bool) -> dict[str, int]:
    """Return the points by principle. query: None for an answer. missing: whether something that is
    needed is not known yet."""
    if query is None:
        return {"Information": information, "Decision": 0 if missing else _EACH}
    decision = 0 if not missing else 1 if query == 0 else _EACH
    return {"Information": information, "Query": query, "Decision": decision}


def _asks_anew(turn: JudgedTurn) -> bool:
    query = normalize(turn.query or "")
    return bool(query) and query not in {normalize(past) for past in turn.past_queries}


def _by_evidence(turn: JudgedTurn) -> dict[str, int]:
    found = [passage for passage in turn.evidence if shown(passage, turn.past_observations)]
    missing = [passage for passage in turn.evidence if passage not in found]
    query = None if turn.answer is not None else 0
    if query is not None and missing and _asks_anew(turn):
        query = 1 + int(finds(turn.query or "", missing[0], turn.question))
    question, thought = content_words(turn.question), content_words(turn.think or "")
    source = new = question
    if found:
        title, _, value = map(content_words, parts(found[-1]))
        source, new = content_words(found[-1]), (title | value) - question or title | value
    used = _EACH if 2 * len(new & thought) >= len(new) else int(bool(source & thought))
    return _points(used, query, bool(missing))


def _by_retrieval(turn: JudgedTurn) -> dict[str, int]:
    before, observation = turn.past_observations, turn.observation or ""
    missing = not any(holds(seen, turn.golds) for seen in before)
    if (answer := turn.answer) is not None:
        return _points(_EACH * any(holds(seen, [answer]) for seen in before), None, missing)
    question, brought, query = content_words(turn.question), _EACH, 0
    if not holds(observation, turn.golds):
        new = [text for text in passages(observation) if text not in "\n".join(before)]
        brought = int(bool(question & content_words(" ".join(new))))
    if _asks_anew(turn):
        words = content_words(turn.query or "")
        familiar = words & (question | content_words(" ".join(map(said, before))))
        half = bool(familiar) and 2 * len(familiar) >= len(words)
        query = _EACH if half else int(bool(familiar))
    return _points(brought, query, missing)
