"""The SLATE templates: every placeholder is filled, the output contract is stated, and a file of
the user's replaces one.

They share all up to the end of the context, which a server with a prefix cache computes once.
"""

import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.judges.llm import PROMPTS, ChatEndpoint
from coppice.judges.slate import Slate, parse_score, reply_form
from coppice.wire.messages import JudgedTurn

PLACEHOLDERS = {
    "think": {"context", "thinking"},
    "query": {"context", "thinking", "query"},
    "answer": {"context", "ground_truth", "predicted_answer"},
}
NOWHERE = ChatEndpoint("http://127.0.0.1:1/v1", "m")


@pytest.mark.parametrize("column", PLACEHOLDERS)
def test_a_template_has_its_placeholders_and_states_the_output(column: str) -> None:
    text = (PROMPTS / f"slate_{column}.txt").read_text()
    assert set(re.findall(r"\{(\w+)\}", text)) == PLACEHOLDERS[column]
    assert re.search(r"<explanation>.*</explanation>\s*<score>.*</score>", text, re.DOTALL)
    # the rules of every component
    assert re.findall(r"^([+-]?[01]):", text, re.MULTILINE) == ["+1", "0", "-1"] * 3
    assert parse_score(text) is None  # a model that repeats the instructions has not graded


def test_what_a_turn_says_is_in_its_prompts_and_no_placeholder_is_left() -> None:
    turn = JudgedTurn(
        "Q", ["Sofia", "Sofiya"], "CONTEXT", "", 2, 4, think="THINK", query="QUERY", answer=None
    )
    made = Slate(NOWHERE).prompts(turn)
    assert all("CONTEXT" in text and "THINK" in text for text in made.values())
    assert "QUERY" in made["query"]
    assert not any(re.search(r"\{\w+\}", text) for text in made.values())


def test_a_template_of_the_users_replaces_the_built_in_one(tmp_path: Path) -> None:
    own = tmp_path / "think.txt"
    own.write_text("Grade {thinking}. {unknown} stays.")
    judge = Slate(NOWHERE, {"think": str(own)})
    assert judge.prompts(JudgedTurn("Q", [], "", "", 1, 4, think="{context}"))["think"] == (
        "Grade {context}. {unknown} stays."
    )
    assert judge.templates["query"] == (PROMPTS / "slate_query.txt").read_text()
    with pytest.raises(ValueError, match=r"outcome.*think.*query.*answer"):
        Slate(NOWHERE, {"outcome": "x.txt"})


def test_all_prompts_of_one_context_begin_with_the_same_head_and_context() -> None:
    context = "Question: who?\nThinking: {query}\nQuery: a\nRetrieved: b"
    judge, turn = Slate(NOWHERE), partial(JudgedTurn, "Q", ["gold"], context, "", 1, 4)
    turns = [turn(think=f"I think {i}", query=f"query {i}") for i in range(4)]
    turns.append(turn(think="I think", answer="an answer"))
    made = [text for turn in turns for text in judge.prompts(turn).values()]
    head = judge.templates["think"].partition("{context}")[0] + context
    assert len(set(made)) == len(made) == 10
    assert all(text.startswith(f"{head}\n\n") for text in made)


@given(st.integers(62, 4000))
def test_a_constrained_reply_is_read_and_fits(max_tokens: int) -> None:
    form = reply_form(max_tokens)
    room = max_tokens - 46
    longest = f"<explanation>{'x' * room}</explanation>\n<score>+1</score>"
    assert re.fullmatch(form, longest)
    assert len(longest) < max_tokens  # of at least one character a token, with one left for the end
    assert parse_score(longest) == 1.0
    assert not re.fullmatch(form, longest.replace("x", "xx", 1))
    assert not re.fullmatch(form, longest.replace("+1", "2"))


def test_too_few_tokens_for_a_constrained_reply_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ValueError, match=r"max_tokens 40: .* 62 or more"):
        Slate(ChatEndpoint("http://h", "m", max_tokens=40, constrain="sglang"))
    Slate(ChatEndpoint("http://h", "m", max_tokens=40))
