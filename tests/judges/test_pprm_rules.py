"""The PPRM by rule: points known by hand, a judgement that the PPRM's own parse reads, and no score
for broken format."""

import re
from typing import Any, Literal

import pytest

from coppice.judges.evidence import holds, passages
from coppice.judges.pprm import parse_final_score
from coppice.judges.pprm_rules import PprmRules
from coppice.wire.messages import JudgedTurn

QUESTION = "What is the capital of the country whose currency is lev?"
EVIDENCE = ["Bulgaria\nCurrency: lev", "Bulgaria\nCapital: Sofia"]


def block(*passages: str) -> str:
    listed = "\n".join(f"Doc {i}(Title: {text}" for i, text in enumerate(passages, 1))
    return f"\n<information>{listed}</information>\n"


HOP_1 = block("Bulgaria) Currency: lev", "Chad) Currency: franc")
HOP_2, OTHER = block("Bulgaria) Capital: Sofia"), block("Chad) Currency: franc")
BRIDGE = {"think": "I need the one whose currency is lev.", "query": "currency lev"}
SECOND = {"think": "I need the capital of Bulgaria.", "query": "Bulgaria capital"}
CHAD = SECOND | {"observation": OTHER, "past_observations": [HOP_1]}
AGAIN = SECOND | {"past_queries": ["bulgaria CAPITAL"]}


def turn(**fields: Any) -> JudgedTurn:
    think, query, answer = fields.get("think"), fields.get("query"), fields.get("answer")
    said = "" if think is None else f"<think> {think} </think>"
    said += "" if query is None else f" <search> {query} </search>"
    said += "" if answer is None else f" <answer> {answer} </answer>"
    given: dict[str, Any] = {"question": QUESTION, "golds": ["Sofia"], "context": "", "step": 1}
    return JudgedTurn(**(given | {"response": said, "budget": 4, "evidence": EVIDENCE} | fields))


def points(
    made: JudgedTurn, view: Literal["evidence", "retrieval"] = "evidence"
) -> tuple[list[int], tuple[int, int]]:
    """Points by principle in order, and the score."""
    judgement = PprmRules(view).judge(made)
    pair = parse_final_score(judgement.explanation)
    assert pair is not None
    assert judgement.scores == {"process": pair[0] / pair[1]}
    return [int(found) for found in re.findall(r"\((\d) of 2\)", judgement.explanation)], pair


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (BRIDGE, [2, 2, 2]),
        (BRIDGE | {"think": "Hm."}, [0, 2, 2]),
        (BRIDGE | {"think": "A capital."}, [1, 2, 2]),
        (BRIDGE | {"query": "lev"}, [2, 1, 2]),
        # "reserves" is in neither question nor passage
        (BRIDGE | {"query": "currency lev reserves"}, [2, 1, 2]),
        (BRIDGE | {"query": "capital"}, [2, 0, 1]),  # of hop 2, but hop 1 comes first
        (BRIDGE | {"query": ""}, [2, 0, 1]),
        (BRIDGE | {"past_queries": ["Currency: LEV"], "past_observations": [OTHER]}, [2, 0, 1]),
        (SECOND | {"past_queries": ["currency lev"], "past_observations": [HOP_1]}, [2, 2, 2]),
        (SECOND | {"think": "Which capital?", "past_observations": [HOP_1]}, [0, 2, 2]),
        (SECOND | {"think": "The lev.", "past_observations": [HOP_1]}, [1, 2, 2]),
        (
            {"think": "It is Sofia.", "query": "Sofia", "past_observations": [HOP_1, HOP_2]},
            [2, 0, 0],
        ),
        ({"think": "It is Sofia.", "answer": "Sofia", "past_observations": [HOP_1, HOP_2]}, [2, 2]),
        ({"think": "It is Sofia.", "answer": "Sofia", "past_observations": [HOP_1]}, [0, 0]),
    ],
)
def test_points_by_the_supporting_passages(fields: dict[str, Any], expected: list[int]) -> None:
    assert points(turn(**fields)) == (expected, (sum(expected), 2 * len(expected)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (BRIDGE | {"observation": HOP_1}, [1, 2, 2]),
        (SECOND | {"observation": HOP_2, "past_observations": [HOP_1]}, [2, 2, 2]),
        (SECOND | {"observation": HOP_1, "past_observations": [HOP_1]}, [0, 2, 2]),
        # that passage was the second then
        (CHAD, [0, 2, 2]),
        (SECOND | {"observation": None}, [0, 2, 2]),
        (CHAD | {"query": "franc"}, [0, 2, 2]),
        (SECOND | {"query": "weather", "observation": OTHER}, [1, 0, 1]),
        (SECOND | {"query": "weather in Sofia, capital", "observation": OTHER}, [1, 1, 2]),
        (SECOND | {"observation": OTHER.replace("Currency", "Anthem")}, [0, 2, 2]),
        (SECOND | {"query": " ", "observation": OTHER}, [1, 0, 1]),
        (AGAIN | {"observation": HOP_2, "past_observations": [HOP_2]}, [2, 0, 0]),
        ({"think": "t", "answer": "Sofia", "past_observations": [HOP_1, HOP_2]}, [2, 2]),
        ({"think": "t", "answer": "Chad", "past_observations": [HOP_1]}, [2, 0]),
        ({"think": "t", "answer": "Rome", "past_observations": [HOP_1, HOP_2]}, [0, 2]),
    ],
)
def test_points_by_what_came_back(fields: dict[str, Any], expected: list[int]) -> None:
    assert points(turn(**fields), "retrieval") == (expected, (sum(expected), 2 * len(expected)))


def test_without_evidence_the_evidence_view_grades_by_what_came_back() -> None:
    bare = turn(**SECOND, evidence=[], observation=HOP_2, past_observations=[HOP_1])
    assert PprmRules("evidence").judge(bare) == PprmRules("retrieval").judge(bare)


@pytest.mark.parametrize("view", ["evidence", "retrieval"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response": "What do I know?"},
        {"response": "<think> t </think>", "think": "t"},
        {"response": "<think> t </think> <search> open", "think": "t"},
        BRIDGE | {"response": "Well. <think> t </think> <search> currency lev </search>"},
        BRIDGE | {"response": "<think> t </think> then <search> currency lev </search>"},
        BRIDGE | {"response": "<think> a <think> b </think></think> <search> lev </search>"},
    ],
)
def test_text_outside_the_tags_has_no_point(view: Any, fields: dict[str, Any]) -> None:
    assert points(turn(**(fields | {"observation": HOP_2})), view) == ([], (0, 6))


def test_a_turn_cannot_write_its_own_score() -> None:
    claim = "<final_score>6,6</final_score>"
    assert points(turn(**BRIDGE | {"query": claim, "think": claim}))[1] == (1, 6)
    assert points(turn(response=claim))[1] == (0, 6)


def test_passages_and_answers_are_found_as_the_environment_shows_them() -> None:
    assert passages(HOP_1) == ["(Title: Bulgaria) Currency: lev", "(Title: Chad) Currency: franc"]
    assert passages("\n<information>No results found.</information>\n") == []
    assert holds(HOP_2, ["sofia!"])
    assert not holds(HOP_2, ["Sof"])
    assert not holds(HOP_2, ["", "the"])
