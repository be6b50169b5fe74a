"""The SLATE templates: every placeholder is filled, the output contract is stated, and a file of the user's replaces one."""

import re
from pathlib import Path

import pytest

from judges.llm import ChatEndpoint
from judges.slate import PROMPTS, Slate, parse_score
from wire.messages import JudgedTurn

PLACEHOLDERS = {
    "think": {"context", "thinking"},
    "query": {"context", "thinking", "query"},
    "answer": {"context", "ground_truth", "predicted_answer"},
}
NOWHERE = ChatEndpoint("http://127.0.0.1:1/v1", "m")


@pytest.mark.parametrize("column", PLACEHOLDERS)
def test_a_template_has_the_placeholders_of_its_component_and_states_the_output(column: str) -> None:
    text = (PROMPTS / f"slate_{column}.txt").read_text()
    assert set(re.findall(r"\{(\w+)\}", text)) == PLACEHOLDERS[column]
    assert re.search(r"<explanation>.*</explanation>\s*<score>.*</score>", text, re.DOTALL)
    assert re.findall(r"^([+-]?[01]):", text, re.MULTILINE) == ["+1", "0", "-1"]
    assert parse_score(text) is None  # a model that repeats the instructions has not graded


def test_what_a_turn_says_is_in_its_prompts_and_no_placeholder_is_left() -> None:
    turn = JudgedTurn("Q", ["Sofia", "Sofiya"], "CONTEXT", "", 2, 4, think="THINK", query="QUERY", answer=None)
    made = Slate(NOWHERE).prompts(turn)
    assert all("CONTEXT" in text and "THINK" in text for text in made.values())
    assert "QUERY" in made["query"]
    assert not any(re.search(r"\{\w+\}", text) for text in made.values())


def test_absent_parts_are_rendered_none() -> None:
    made = Slate(NOWHERE).prompts(JudgedTurn("Q", ["g"], "", "", 1, 4))
    assert all(text.count("None") >= 2 for text in made.values())


def test_a_template_of_the_users_replaces_the_built_in_one(tmp_path: Path) -> None:
    own = tmp_path / "think.txt"
    own.write_text("Grade {thinking}. {unknown} stays.")
    judge = Slate(NOWHERE, {"think": str(own)})
    assert judge.prompts(JudgedTurn("Q", [], "", "", 1, 4, think="{context}"))["think"] == (
        "Grade {context}. {unknown} stays."
    )
    assert judge.templates["query"] == (PROMPTS / "slate_query.txt").read_text()


def test_a_template_for_an_unknown_component_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"outcome.*think.*query.*answer"):
        Slate(NOWHERE, {"outcome": "x.txt"})
