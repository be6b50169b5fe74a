"""The default data and the supervised traces made from it."""

import json
from pathlib import Path

import msgspec
import pytest

from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import load_tasks
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.index import Index, build
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.facts import build as build_facts
from coppice.tools.defaults.settings import WarmStart
from coppice.tools.defaults.warm_start import _Row, traces


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("facts") / "made"
    build_facts(out)
    return out


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_default_data_is_large_enough_and_a_third_of_it_needs_two_hops(facts: Path) -> None:
    questions = [
        row for split in ("train", "warm", "heldout") for row in rows(facts / f"{split}.jsonl")
    ]
    assert len(rows(facts / "corpus.jsonl")) >= 2000
    assert len(questions) >= 1000
    assert sum(row["hops"] == 2 for row in questions) * 3 >= len(questions)


def test_no_held_out_entity_is_in_any_training_question_or_its_evidence(facts: Path) -> None:
    held = {row["entity"] for row in rows(facts / "heldout.jsonl")}
    for split in ("train", "warm"):
        for row in rows(facts / f"{split}.jsonl"):
            assert row["entity"] not in held
            assert not {e["title"] for e in row["evidence"]} & held


def test_every_evidence_passage_is_in_the_corpus_and_ends_in_the_gold_answer(facts: Path) -> None:
    corpus = {row["id"]: row["contents"] for row in rows(facts / "corpus.jsonl")}
    for row in rows(facts / "heldout.jsonl"):
        for e in row["evidence"]:
            assert corpus[e["passage_id"]] == f'"{e["title"]}"\n{e["field"]}: {e["value"]}'
        assert row["golden_answers"] == [row["evidence"][-1]["value"]]


def test_a_bridge_names_one_country_only(facts: Path) -> None:
    corpus = [row["contents"] for row in rows(facts / "corpus.jsonl")]
    two_hop = [row for row in rows(facts / "train.jsonl") if row["hops"] == 2][:300]
    for row in two_hop:
        bridge = row["evidence"][0]
        assert sum(c.endswith(f"\n{bridge['field']}: {bridge['value']}") for c in corpus) == 1


def test_the_data_is_made_the_same_every_time(facts: Path, tmp_path: Path) -> None:
    build_facts(tmp_path / "again")
    for name in ("corpus.jsonl", "train.jsonl", "heldout.jsonl"):
        assert (facts / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_default_questions_load_as_tasks(facts: Path) -> None:
    tasks, rejected = load_tasks(str(facts / "heldout.jsonl"))
    assert not rejected
    assert {task.hops for task in tasks} == {1, 2}
    assert all(len(task.evidence) == task.hops for task in tasks)


@pytest.fixture(scope="module")
def index(facts: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("index")
    titles = {row["entity"] for row in rows(facts / "warm.jsonl")[:40]}
    lines = [
        json.dumps(r) for r in rows(facts / "corpus.jsonl") if r["contents"].split('"')[1] in titles
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    encoder = Encoder()
    build(folder / "corpus.jsonl", folder / "index", encoder)
    return Index(folder / "index", encoder)


def test_traces_parse_as_valid_actions_and_the_loss_covers_exactly_the_action(
    facts: Path, index: Index, llama: Path
) -> None:
    text, environment = Text(str(llama)), SearchQA("short", 2)

    warm = [msgspec.convert(r, _Row, strict=False) for r in rows(facts / "warm.jsonl")[:40]]
    made = traces(warm, text, environment, index, 24, WarmStart())
    assert len(made) == 24
    kinds = set()
    for example in made:
        action = text.tokenizer.decode(example.tokens[example.start :])
        prefix = text.tokenizer.decode(example.tokens[: example.start])
        parsed = environment.read(None, action)
        assert parsed.valid
        assert action.startswith("<think>")
        assert action.endswith(("</search>", "</answer>"))
        assert prefix.endswith(("<|assistant|>", "</information>\n"))
        kinds.add(parsed.kind)
    assert kinds == {"search", "answer"}


def test_the_index_finds_a_fact_by_its_title_and_field(facts: Path, index: Index) -> None:
    row = next(r for r in rows(facts / "warm.jsonl")[:40] if r["hops"] == 1)
    fact = row["evidence"][0]
    (found,) = index.search([f"{fact['title']} {fact['field']}"], 2)
    assert (fact["title"], f"{fact['field']}: {fact['value']}") in {
        (p.title, p.text) for p in found
    }
    assert found[0].score >= found[1].score


def test_an_index_of_another_encoder_is_refused(index: Index, tmp_path: Path, facts: Path) -> None:
    index.encoder.name = "other"
    try:
        with pytest.raises(ValueError, match="build the index anew"):
            Index(Path(index.corpus.name).parent, index.encoder)
    finally:
        index.encoder.name = "minilm"
