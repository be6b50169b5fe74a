"""Task files: what loads, and what is set aside with its place and reason."""

import datetime
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from coppice.actors.environments.agents.environment import AgentEnvironment
from coppice.actors.environments.task_files import check_form, listed, load_tasks
from coppice.scheduler.growth.tasks import Tasks, held_out

ROW = {"question": "Who?", "golden_answers": ["a", "", "b"]}


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_unusable_held_out_rows_and_a_set_that_is_too_small_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps(ROW), "", "{broken", "[1]", json.dumps(ROW)]
    path.write_text("\n".join(lines))
    tasks, (rows, few) = held_out(str(path), 5)
    assert len(tasks) == 2
    assert "2 of 4 rows cannot be used" in rows and f"{path}:3: not JSON" in rows
    assert "5 questions are asked for and 2 are there" in few
    assert held_out(written(path, ROW), 1)[1] == []


def test_a_row_that_cannot_be_written_is_set_aside(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", ROW, ROW | {"hops": 1e20}, ROW | {"more": 2**80})
    for verbatim, usable in ((False, 2), (True, 1)):
        tasks, rejected = load_tasks(path, verbatim)
        assert (len(tasks), len(rejected)) == (usable, 3 - usable)


def test_a_byte_order_mark_is_no_text_and_latin_1_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = json.dumps({"question": "Où?", "golden_answers": ["à"]}, ensure_ascii=False)
    path.write_bytes(row.encode("utf-8-sig") + b"\n" + row.encode("latin-1") + b"\n")
    (task,), (rejected,) = load_tasks(str(path))
    assert (task.question, rejected.where) == ("Où?", f"{path}:2")
    assert rejected.reason.startswith("not in UTF-8")


def test_a_row_becomes_a_task_or_is_set_aside_with_its_place(tmp_path: Path) -> None:
    def row(question: str, golds: object = "a", **fields: object) -> dict[str, object]:
        return {"question": question, "golden_answers": golds, **fields}

    passages = [{"title": "Bulgaria", "field": "Capital", "value": "Sofia"}]
    passages += [{"title": "Bulgaria", "text": "Its capital is Sofia."}]
    prompt = [{"role": "user", "content": "Question: an example. Rules. Question: who wrote it\n"}]
    rows = [
        *(row("who "), row("It."), row("q?", extra_info={"index": 0})),
        row("q?", id=7, data_source="factbook", evidence=passages),
        {"prompt": prompt, "reward_model": {"ground_truth": {"target": ["x", "y"]}}},
        *(row("unusable", golds) for golds in ([], ["  "], None, ["x", 1946])),
        row("q", evidence=[{"title": "no field"}]),
    ]
    source = written(tmp_path / "t.jsonl", *rows)
    tasks, rejected = load_tasks(source)
    assert [task.question for task in tasks] == ["who?", "It.", "q?", "q?", "who wrote it?"]
    assert tasks[3].evidence == ["Bulgaria\nCapital: Sofia", "Bulgaria\nIts capital is Sofia."]
    assert (tasks[3].hops, tasks[3].source) == (2, "factbook")
    # without an id, a row takes its index or its place
    assert [task.id for task in tasks] == [f"{source}:1", f"{source}:2", "0", "7", f"{source}:5"]
    assert (tasks[0].golds, tasks[4].golds) == (["a"], ["x", "y"])
    assert [one.where for one in rejected] == [f"{source}:{line}" for line in range(6, 11)]
    assert {one.reason[:14] for one in rejected[:3]} == {"no gold answer"}
    assert rejected[3].reason.startswith("a gold answer is 1946")
    assert rejected[4].reason.startswith("evidence or hops")


@pytest.mark.parametrize("source", ["a b", "none.parquet", "/no/such/folder", "./owner/name"])
def test_what_is_neither_a_file_nor_a_hub_name_is_named(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"hub dataset owner/name\[:split\]"):
        load_tasks(source)
    if source != "none.parquet":
        with pytest.raises(ValueError, match=r"expected a \.jsonl or \.parquet path"):
            check_form(source)


SET = "RUC-NLPIR/FlashRAG_datasets"


def test_equal_ids_of_several_sources_stay_apart_and_a_run_draws_from_all(tmp_path: Path) -> None:
    rows = [{"id": f"n{i}", "question": f"{i}?", "golden_answers": ["a"]} for i in range(5)]
    sources = [written(tmp_path / name, *rows, {}) for name in ("x.jsonl", "y.jsonl")]
    tasks, rejected = load_tasks(sources)
    assert [task.id for task in tasks] == [f"{source}#n{i}" for source in sources for i in range(5)]
    assert [one.where for one in rejected] == [f"{source}:6" for source in sources]
    assert load_tasks(sources[0])[0][0].id == "n0"
    drawn = Tasks(sources, 0)
    assert {drawn.at(position).id for position in range(10)} == {task.id for task in tasks}
    assert {task.id for task in held_out(sources, 99)[0]} == {task.id for task in tasks}
    assert held_out(sources, 3)[0] == held_out(sources, 99)[0][:3]


def test_hops_in_turn_are_drawn_alike_each_in_its_own_epochs(tmp_path: Path) -> None:
    rows = [
        {"id": f"{n}{hops}", "question": f"{n}?", "golden_answers": ["a"], "hops": hops}
        for hops, count in ((2, 2), (1, 6))
        for n in range(count)
    ]
    drawn = Tasks(written(tmp_path / "x.jsonl", *rows), 0, in_turn=True)
    names = [drawn.at(position).id for position in range(12)]
    assert sorted(names[::2]) == [f"{n}1" for n in range(6)]  # one whole epoch
    assert all(set(names[i : i + 4 : 2]) == {"02", "12"} for i in (1, 5, 9))  # three
    assert [drawn.at(position).id for position in range(12)] == names


def test_one_source_of_several_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = written(tmp_path / "a.jsonl", {"question": "q", "golden_answers": ["a"]})
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        load_tasks([good, str(tmp_path / "gone.jsonl")])
    with pytest.raises(ValueError, match=r"b\.jsonl holds no usable task: it is empty"):
        load_tasks([good, written(tmp_path / "b.jsonl")])
    with pytest.raises(ValueError, match="twice"):
        listed([good, good])


def test_a_folder_of_the_hub_is_train_unless_a_split_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    def download(repository: str, file: str, repo_type: str) -> str:
        assert (repository, repo_type) == (SET, "dataset")
        if file not in ("nq/train.jsonl", "nq/dev.jsonl"):
            raise EntryNotFoundError(file)
        row = {"id": "0", "question": f"{file}?", "golden_answers": ["a"]}
        return written(tmp_path / file.replace("/", "-"), row)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    questions = [
        load_tasks(f"{SET}/{name}")[0][0].question for name in ("nq", "nq:train", "nq:dev")
    ]
    assert questions == ["nq/train.jsonl?", "nq/train.jsonl?", "nq/dev.jsonl?"]
    with pytest.raises(FileNotFoundError, match=r"has no nq/test\.jsonl: give a path"):
        load_tasks(f"{SET}/nq:test")


def test_a_set_of_folders_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, split: str) -> None:
        raise ValueError("Config name is missing.\nPlease pick one among the configs: ['nq']")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    said = f"did not give {SET}: Config name is missing.*owner/name/folder:split"
    with pytest.raises(FileNotFoundError, match=said):
        load_tasks(f"{SET}:train")


def test_tasks_of_agents_stand_as_they_are_written(tmp_path: Path) -> None:
    rows = [{"id": "a", "question": " Add 1 and 2"}, {"id": "b"}, {"golden_answers": ["x"]}]
    source = written(tmp_path / "tasks.jsonl", *rows)
    tasks, rejected = load_tasks(source, verbatim=True)
    read = [(task.question, task.golds) for task in tasks]
    assert read == [(" Add 1 and 2", []), ("", [])]
    assert [one.where for one in rejected] == [f"{source}:3"]


def test_a_task_taken_as_it_stands_has_all_columns_of_its_row(tmp_path: Path) -> None:
    row = {"question": "q", "golden_answers": ["a"], "limits": [1, 2.5], "id": 7}
    row["due"] = datetime.date(2026, 1, 2)
    place = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), place)
    ((task,), _) = load_tasks(str(place), verbatim=True)
    assert task.row == row | {"due": "2026-01-02"}
    shown = task.row | {"id": "7", "golds": ["a"], "seed": 0}
    agent = AgentEnvironment("module:run")
    assert agent.initial(task).task == shown
    told = agent.initial(
        msgspec.structs.replace(task, row=task.row | {"golds": "own", "seed": 9})
    ).task
    assert (told["golds"], told["seed"]) == ("own", 9)
    assert load_tasks(str(place))[0][0].row == {}
