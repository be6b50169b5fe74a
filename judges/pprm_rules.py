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
import textwrap
from typing import Literal

from coppice.judges.base import RuleJudge
from coppice.judges.evidence import content_words, finds, holds, parts, passages, said, shown
from coppice.judges.exact_match import normalize
from coppice.wire.messages import JudgedTurn, Judgement

Graded = tuple[int, str]
"""The points of one principle (0 to 2) and the reason in words."""

_BLOCK = re.compile(r"<(think|search|information|answer)>.*?</\1>", re.DOTALL)
_HALF = 0.5
_EACH = 2
_SHOWN = 100
"""A judgement quotes at most this many characters of the turn."""


class PprmRules(RuleJudge):
    """Column process, S/M. The explanation has the form in which a PPRM writes it."""

    name = "pprm_rules"
    columns = ("process",)

    def __init__(self, view: Literal["evidence", "retrieval"] = "evidence"):
        self.view = view

    def judge(self, turn: JudgedTurn) -> Judgement:
        problem = _format(turn)
        if problem:
            return _judgement(0, 3 * _EACH, f"Format: {problem}, so no point is given.")
        knows_passages = self.view == "evidence" and turn.evidence
        graded = _by_evidence(turn) if knows_passages else _by_retrieval(turn)
        reasons = [
            f"{name}: {why} ({points} of {_EACH})." for name, (points, why) in graded.items()
        ]
        reached = sum(points for points, _ in graded.values())
        return _judgement(reached, _EACH * len(graded), " ".join(reasons))


def _judgement(reached: int, most: int, analysis: str) -> Judgement:
    text = f"Analysis: {analysis}\nScores: <final_score>{reached},{most}</final_score>"
    return Judgement({"process": reached / most}, explanation=text)


def _format(turn: JudgedTurn) -> str:
    """Return how the turn breaks the format rule, "" if it does not."""
    if outside := _BLOCK.sub("", turn.response).strip():
        return f"{_quoted(outside)} stands outside the tags"
    if turn.query is None and turn.answer is None:
        return "there is neither a search nor an answer that can be read"
    return ""


def _quoted(text: str) -> str:
    return f'"{textwrap.shorten(text, _SHOWN, placeholder=" ..")}"'


def _known_words(turn: JudgedTurn) -> set[str]:
    """Return the content words of the question and of everything that came back before the turn."""
    return content_words(" ".join([turn.question, *map(said, turn.past_observations)]))


def _unusable(turn: JudgedTurn) -> str:
    """Return why a query gets no point whatever it asks for, "" if it may get some."""
    query = normalize(turn.query or "")
    if not query:
        return "the query is empty"
    asked_before = query in {normalize(past) for past in turn.past_queries}
    return f"the query {_quoted(query)} was asked before" if asked_before else ""


def _by_evidence(turn: JudgedTurn) -> dict[str, Graded]:
    found = [passage for passage in turn.evidence if shown(passage, turn.past_observations)]
    missing = [passage for passage in turn.evidence if passage not in found]
    graded = {"Information": _used(turn, found[-1]) if found else _understood(turn)}
    if turn.answer is None:
        graded["Query"] = _finding(turn, missing)
    graded["Decision"] = _decided(graded.get("Query"), _named(missing[0], turn) if missing else "")
    return graded


def _named(passage: str, turn: JudgedTurn) -> str:
    """Describe a passage for a reader of the turn. The title is named only if the question or an
    observation names it."""
    title, field, value = parts(passage)
    if content_words(title) <= _known_words(turn):
        return f"the {field.lower()} of {title}"
    return f"the one whose {field.lower()} is {value}"


def _understood(turn: JudgedTurn) -> Graded:
    """Grade the use of the question, all that is known before a supporting passage is shown."""
    question, thought = content_words(turn.question), content_words(turn.think or "")
    if len(question & thought) >= _HALF * len(question):
        return _EACH, "the reasoning takes up what the question asks"
    if question & thought:
        return 1, "the reasoning takes up little of the question"
    return 0, "the reasoning ignores the question"


def _used(turn: JudgedTurn, passage: str) -> Graded:
    title, _, value = map(content_words, parts(passage))
    thought, named = content_words(turn.think or ""), _named(passage, turn)
    new = (title | value) - content_words(turn.question) or title | value
    if len(new & thought) >= _HALF * len(new):
        return _EACH, f"the reasoning uses what was found, {named}"
    if content_words(passage) & thought:
        return 1, f"the reasoning touches what was found, {named}, without using it"
    return 0, f"the reasoning leaves out what was found, {named}"


def _finding(turn: JudgedTurn, missing: list[str]) -> Graded:
    if unusable := _unusable(turn):
        return 0, unusable
    query = f"the query {_quoted(normalize(turn.query or ''))}"
    if not missing:
        return 0, f"{query} asks for nothing that is still missing"
    fit, passage = finds(turn.query or "", missing[0], turn.question), _named(missing[0], turn)
    if fit > 0:
        return _EACH, f"{query} would find {passage}"
    if fit == 0:
        return 1, f"{query} names only part of what finds {passage}"
    return 0, f"{query} does not ask for {passage}"


def _decided(query: Graded | None, missing: str) -> Graded:
    """Grade the decision. query: the grade of the query, None for an answer. missing: what is not
    known yet, "" if nothing is missing."""
    acts = "it answers" if query is None else "it searches"
    state = f"{missing} is not known yet" if missing else "all that is needed was shown"
    if bool(missing) != (query is not None):
        return 0, f"{acts} although {state}"
    if query is not None and query[0] == 0:
        return 1, f"{acts} and {state}, but it does not search for that"
    return _EACH, f"{acts} and {state}"


def _by_retrieval(turn: JudgedTurn) -> dict[str, Graded]:
    before = turn.past_observations
    missing = "" if any(holds(seen, turn.golds) for seen in before) else "the answer"
    if (answer := turn.answer) is None:
        query = _worded(turn)
        return {"Information": _brought(turn), "Query": query, "Decision": _decided(query, missing)}
    rests = any(holds(seen, [answer]) for seen in before)
    why = (
        f"the answer {_quoted(answer)} {'stands' if rests else 'does not stand'} in what was found"
    )
    return {"Information": (_EACH * rests, why), "Decision": _decided(None, missing)}


def _brought(turn: JudgedTurn) -> Graded:
    if holds(turn.observation or "", turn.golds):
        return _EACH, "what came back holds the answer"
    before = "\n".join(turn.past_observations)
    new = [passage for passage in passages(turn.observation or "") if passage not in before]
    if not new:
        return 0, "nothing new came back"
    if content_words(turn.question) & content_words(" ".join(new)):
        return 1, "what came back is new and of the question's subject but does not hold the answer"
    return 0, "what came back is not of the question's subject"


def _worded(turn: JudgedTurn) -> Graded:
    if unusable := _unusable(turn):
        return 0, unusable
    query = normalize(turn.query or "")
    words, said = content_words(query), f"the query {_quoted(query)}"
    familiar = words & _known_words(turn)
    if familiar and len(familiar) >= _HALF * len(words):
        return _EACH, f"{said} is new and to the point"
    if familiar:
        return 1, f"{said} is new but mostly of words that nothing before speaks of"
    return 0, f"{said} shares no word with the question or what was found"
