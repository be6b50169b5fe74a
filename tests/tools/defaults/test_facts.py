"""The default data."""

import json
from pathlib import Path

import pytest

from coppice.actors.environments.task_files import load_tasks
from coppice.tools.defaults.facts import build as build_facts

SPLITS = ("train", "warm", "heldout")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("facts") / "made"
    build_facts(out)
    return out


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_default_data_is_as_large_as_the_documents_say_and_loads_as_tasks(facts: Path) -> None:
    questions = [row for split in SPLITS for row in rows(facts / f"{split}.jsonl")]
    assert len(rows(facts / "corpus.jsonl")) == 3890
    assert [sum(row["hops"] == hops for row in questions) for hops in (1, 2)] == [3890, 2204]
    tasks, rejected = load_tasks(str(facts / "heldout.jsonl"))
    assert not rejected
    assert all(len(task.evidence) == task.hops for task in tasks)


def test_no_held_out_entity_is_in_any_training_question_or_its_evidence(facts: Path) -> None:
    held = {row["entity"] for row in rows(facts / "heldout.jsonl")}
    for row in (row for split in ("train", "warm") for row in rows(facts / f"{split}.jsonl")):
        assert row["entity"] not in held
        assert not {e["title"] for e in row["evidence"]} & held


def test_evidence_is_in_the_corpus_and_a_bridge_names_one_country(facts: Path) -> None:
    corpus = {row["id"]: row["contents"] for row in rows(facts / "corpus.jsonl")}
    for row in rows(facts / "heldout.jsonl")[:600]:
        for e in row["evidence"]:
            assert corpus[e["passage_id"]] == f'"{e["title"]}"\n{e["field"]}: {e["value"]}'
        assert row["golden_answers"] == [row["evidence"][-1]["value"]]
        if row["hops"] == 2:
            end = f"\n{row['evidence'][0]['field']}: {row['evidence'][0]['value']}"
            assert sum(text.endswith(end) for text in corpus.values()) == 1


def test_the_data_is_made_the_same_every_time(facts: Path, tmp_path: Path) -> None:
    build_facts(tmp_path / "again")
    for name in ("corpus", *SPLITS):
        again = tmp_path / "again" / f"{name}.jsonl"
        assert (facts / f"{name}.jsonl").read_bytes() == again.read_bytes()
