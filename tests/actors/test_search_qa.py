"""The search-QA environment and its task files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from actors.environments.base import Task
from actors.environments.search_qa import SearchQA
from actors.environments.task_files import load_tasks
from wire.messages import Passage

TASK = Task("1", "What is the capital of Bulgaria?", ["Sofia"])


class Shelf:
    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        return [Passage("1", "Bulgaria", "Capital: Sofia", 0.9), Passage("2", "Rome", "x" * 400, 0.5)][:topk]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<think> a </think> <search> q </search>", "search"),
        ("\n<think>a</think>\n<answer>x</answer> and more", "answer"),
        ("<search> q </search>", "invalid"),
        ("<think> a </think> q", "invalid"),
        ("<think> a </think> <search> q", "invalid"),
        ("<think> a </think> <search> q </answer>", "invalid"),
        ("hello <think> a </think> <search> q </search>", "invalid"),
        ("", "invalid"),
    ],
)
def test_an_action_is_one_think_block_then_one_search_or_answer_block(text: str, kind: str) -> None:
    assert SearchQA().parse(text).kind == kind


async def test_stepping_is_pure_and_shows_passages_one_a_line() -> None:
    environment = SearchQA("short", 2, max_observation_characters=60)
    state = environment.initial(TASK)
    action = environment.parse("<think> t </think> <search> capital </search>")
    moved = await environment.step(state, action, Shelf())
    assert state.steps == ()
    assert moved.state.steps[0].query == "capital"
    assert moved.observation.startswith("\n<information>Doc 1(Title: Bulgaria) Capital: Sofia\nDoc 2(Title: Rome)")
    assert moved.observation.endswith("</information>\n")
    assert len(moved.observation) == 60 + len("\n<information></information>\n")
    done = await environment.step(moved.state, environment.parse("<think>t</think><answer>Sofia</answer>"), Shelf())
    assert done.done
    assert done.state.done


async def test_an_invalid_action_uses_a_step_and_shows_the_notice() -> None:
    environment = SearchQA()
    moved = await environment.step(environment.initial(TASK), environment.parse("what?"), Shelf())
    assert "could not be used" in moved.observation
    assert len(moved.state.steps) == 1


async def test_the_judges_context_is_the_bare_question_and_each_past_step() -> None:
    environment = SearchQA("short", 2)
    state = environment.initial(TASK)
    assert environment.context(state) == "Question: What is the capital of Bulgaria?"
    action = environment.parse("<think> t </think> <search> capital </search>")
    moved = await environment.step(state, action, Shelf())
    lines = environment.context(moved.state).split("\n")
    assert lines[1:3] == ["Thinking: t", "Query: capital"]
    retrieved = environment.context(moved.state).split("Retrieved: ")[1]
    assert len(retrieved) == 300
    turn = environment.judged(TASK, moved.state, action, 2, 4)
    assert (turn.step, turn.past_queries, turn.query) == (2, ["capital"], "capital")


def test_a_forced_answer_is_what_stands_before_the_closing_tag() -> None:
    assert SearchQA().parse_forced(" Sofia </answer> more").answer == "Sofia"


def test_prompts_hold_the_question_and_unknown_ones_are_refused() -> None:
    (message,) = SearchQA("search_r1").prompt(TASK)
    assert TASK.question in message["content"]
    assert "<information>" in message["content"]
    with pytest.raises(FileNotFoundError, match="search_r1"):
        SearchQA("serch_r1")


ROWS = [
    {"question": "Who?", "golden_answers": ["a", "b"]},
    {
        "prompt": [{"role": "user", "content": "Rules. Question: what now"}],
        "reward_model": {"ground_truth": {"target": "x"}},
    },
    {"question": "No gold", "golden_answers": []},
    {"golden_answers": ["x"]},
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_search_r1_and_flashrag_rows_load_and_unusable_ones_are_rejected_with_reasons(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"tasks.{ending}"
    if ending == "jsonl":
        path.write_text("\n".join([*map(json.dumps, ROWS), "{broken"]) + "\n")
    else:
        columns = {name for row in ROWS for name in row}
        whole = [{name: row.get(name) for name in columns} for row in ROWS]
        pyarrow.parquet.write_table(pa.Table.from_pylist(whole), path)
    tasks, rejected = load_tasks(str(path))
    assert [t.question for t in tasks] == ["Who?", "what now?"]
    assert [t.golds for t in tasks] == [["a", "b"], ["x"]]
    reasons = [r.reason for r in rejected]
    assert "no gold answer" in reasons[0]
    assert "no question" in reasons[1]
    assert rejected[0].where.endswith(":3")
    assert len(rejected) == (3 if ending == "jsonl" else 2)


def test_a_missing_file_or_one_without_tasks_is_an_error_that_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"jsonl or \.parquet"):
        load_tasks(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(ValueError, match="no gold answer"):
        load_tasks(str(tmp_path / "empty.jsonl"))
