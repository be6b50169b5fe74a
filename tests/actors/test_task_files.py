"""Task files: what loads, and what is set aside with its place and reason."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from actors.environments.task_files import load_tasks

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


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_empty_file_is_an_error_and_not_a_run_without_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable task"):
        load_tasks(written(tmp_path / "empty.jsonl"))


def test_a_line_that_is_no_object_is_set_aside_and_the_rest_loads(tmp_path: Path) -> None:
    source = written(tmp_path / "t.jsonl", [1], "text", {"question": "Who?", "golden_answers": "a"})
    tasks, rejected = load_tasks(source)
    assert [task.golds for task in tasks] == [["a"]]
    assert [r.where for r in rejected] == [f"{source}:1", f"{source}:2"]
    assert all("expected an object" in r.reason for r in rejected)


@pytest.mark.parametrize("golds", [[], [""], ["  "], None, [1946], ""])
def test_a_question_without_a_usable_gold_answer_is_set_aside(tmp_path: Path, golds: object) -> None:
    source = written(
        tmp_path / "t.jsonl", {"question": "q", "golden_answers": golds}, {"question": "r", "golden_answers": ["a"]}
    )
    tasks, (rejected,) = load_tasks(source)
    assert [task.question for task in tasks] == ["r?"]
    assert (rejected.where, rejected.reason[:14]) == (f"{source}:1", "no gold answer")


def test_blank_golds_beside_good_ones_are_left_out(tmp_path: Path) -> None:
    ((task,), _) = load_tasks(written(tmp_path / "t.jsonl", {"question": "q?", "golden_answers": ["a", "", "b"]}))
    assert task.golds == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "read"), [("who ", "who?"), ("Who?", "Who?"), ("Name it.", "Name it."), ("Go!", "Go!")]
)
def test_a_question_mark_is_added_only_where_a_sentence_has_no_end(tmp_path: Path, given: str, read: str) -> None:
    ((task,), _) = load_tasks(written(tmp_path / "t.jsonl", {"question": given, "golden_answers": ["a"]}))
    assert task.question == read


def test_evidence_becomes_passage_texts_and_counts_the_hops(tmp_path: Path) -> None:
    facts = [{"title": "Bulgaria", "field": "Capital", "value": "Sofia"}, {"title": "B", "field": "F", "value": "v"}]
    row = {"id": 7, "question": "q?", "golden_answers": ["v"], "evidence": facts, "data_source": "factbook"}
    ((task,), _) = load_tasks(written(tmp_path / "t.jsonl", row))
    assert task.evidence == ["Bulgaria\nCapital: Sofia", "B\nF: v"]
    assert (task.id, task.hops, task.source) == ("7", 2, "factbook")


def test_a_row_without_an_id_takes_its_index_or_its_place(tmp_path: Path) -> None:
    row = {"question": "q?", "golden_answers": ["a"]}
    source = written(tmp_path / "t.jsonl", row | {"extra_info": {"index": 12}}, row)
    tasks, _ = load_tasks(source)
    assert [task.id for task in tasks] == ["12", f"{source}:2"]


def test_a_search_r1_prompt_gives_the_question_after_its_last_marker(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Question: is an example. Rules. Question: who wrote it\n"}]
    row = {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": {"target": ["x", "y"]}}}
    ((task,), _) = load_tasks(written(tmp_path / "t.jsonl", row))
    assert (task.question, task.golds) == ("who wrote it?", ["x", "y"])


@pytest.mark.parametrize("source", ["a b", "none.parquet", "/no/such/folder", "./owner/name"])
def test_what_is_neither_a_file_nor_a_hub_name_is_named(source: str) -> None:
    with pytest.raises(FileNotFoundError, match="hub dataset owner/name"):
        load_tasks(source)
