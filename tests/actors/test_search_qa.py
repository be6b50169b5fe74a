"""The search-QA environment."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.actors.environments.base import Task, Tools
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.judges.exact_match import extract_answer
from coppice.wire.messages import Passage

NO_TOOLS: Any = None
TASK = Task("1", "What is the capital of Bulgaria?", ["Sofia"])


class Shelf(Tools):
    rng = random.Random(0)

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        sofia = Passage("1", "Bulgaria", "Capital: Sofia", 0.9)
        return [sofia, Passage("2", "Rome", "x" * 400, 0.5)][:topk]


SOFIA = "<answer> It is <answer> Sofia </answer>"


@pytest.mark.parametrize(
    ("think", "text", "read"),
    [
        ("required", "<think> a </think> <search> q </search>", ("search", "a", "q")),
        ("required", "\n<think>a</think>\n<answer>x</answer> and more", ("answer", "a", "x")),
        ("required", "<think> a </think> <search> q", None),
        ("required", "<think> <answer> x </answer> </think>", None),
        ("required", f"<think> x </think> {SOFIA}", ("answer", "x", "Sofia")),
        ("optional", "First I look. <search> q </search>", ("search", "", "q")),
        ("optional", "<answer>x</answer><think>b</think><search>q</search>", ("answer", "", "x")),
        ("optional", "<think> a </think> <search> q </answer>", None),
        ("optional", f"<think> a <answer> b </think> {SOFIA}", ("answer", "a <answer> b", "Sofia")),
    ],
)
def test_the_first_block_counts_and_an_answer_begins_at_the_last_tag_as_the_table_reads_it(
    think: Any, text: str, read: tuple[str, ...] | None
) -> None:
    action = SearchQA(think=think).read(None, text)
    found = (action.kind, action.think, action.argument)
    assert found == (read or ("invalid", None, None))
    assert action.kind != "answer" or extract_answer(text) == action.argument


@pytest.mark.parametrize("think", ["required", "optional"])
@pytest.mark.parametrize("piece", ["<think>", "</think><answer>"])
def test_reading_takes_no_longer_than_the_text_is_long(piece: str, think: Any) -> None:
    text = "<think></think>" + piece * 50_000 + "</think><answer> Sofia </answer>"
    start = time.process_time()
    assert SearchQA(think=think).read(None, text).argument == "Sofia"
    assert time.process_time() - start < 5  # minutes at the square of its length


async def test_stepping_is_pure_and_shows_passages_one_a_line() -> None:
    environment = SearchQA("short", 2, max_observation_characters=60)
    state = environment.initial(TASK)
    action = environment.read(None, "<think> t </think> <search> capital </search>")
    moved = await environment.step(state, action, Shelf())
    assert state.steps == () and moved.state.steps[0].query == "capital"
    passage = "Doc 1(Title: Bulgaria) Capital: Sofia"
    shown = f"{passage}\nDoc 2(Title: Rome) {'x' * 400}"[:60]
    assert moved.observation == f"\n<information>{shown}</information>\n"
    assert environment.render([]) == "\n<information>No results found.</information>\n"
    answer = environment.read(None, "<think>t</think><answer>Sofia</answer>")
    done = await environment.step(moved.state, answer, NO_TOOLS)
    assert (done.observation, done.done, done.state) == ("", True, moved.state)


TAGS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"]
TAGS += ["<information>", " ", "Sofia"]


def sampled(text: str) -> str:
    """As far as an engine generates it: to the first closing tag of a search or an answer."""
    ends = [text.index(stop) + len(stop) for stop in SearchQA.stop if stop in text]
    return text[: min(ends, default=len(text))]


@pytest.mark.parametrize("think", ["required", "optional"])
@given(parts=st.lists(st.sampled_from(TAGS), max_size=12))
def test_whatever_is_sampled_a_readable_or_forced_answer_is_the_one_the_table_reads(
    think: Any, parts: list[str]
) -> None:
    environment = SearchQA(think=think)
    text = sampled("<think></think>" + "".join(parts))
    action = environment.read(None, text)
    if action.kind == "answer":
        assert action.argument == extract_answer(text)
    assert environment.parse_forced(text).argument == extract_answer(f"<answer>{text}</answer>")


async def test_a_judge_sees_the_steps_before_the_action_and_their_usable_queries() -> None:
    environment = SearchQA("short", 2)
    task = Task("1", "Who?", ["a", "b"], evidence=["T\nField: a"])
    assert environment.context(environment.initial(task)) == "Question: Who?"
    action = environment.read(None, "<think>s</think><search>q</search>")
    searched = await environment.step(environment.initial(task), action, Shelf())
    noticed = await environment.step(searched.state, environment.read(None, "?"), Shelf())
    turn = environment.judged(task, noticed.state, environment.parse_forced(" a "), 3, 3)
    assert turn.past_queries == ["q"]
    assert turn.past_observations == [searched.observation, noticed.observation]
    assert (turn.golds, turn.evidence) == (["a", "b"], ["T\nField: a"])
    assert (turn.answer, turn.think) == ("a", None)
    assert turn.context.split("\n")[1:3] == ["Thinking: s", "Query: q"]
    assert "<information>" not in turn.context


def test_a_prompt_file_of_ones_own_must_hold_the_question(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Q: {question}\n")
    (message,) = SearchQA(str(own)).prompt(Task("1", "Is {question} kept?", ["yes"]))
    assert message == {"role": "user", "content": "Q: Is {question} kept?"}
    own.write_text("no place for it")
    with pytest.raises(ValueError, match=r"own\.txt has no \{question\}"):
        SearchQA(str(own))
