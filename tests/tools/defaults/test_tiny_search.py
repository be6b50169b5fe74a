"""The tiny search policy and its warm start on random searches."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults import search_play, tiny
from coppice.tools.defaults.settings import WarmStart

FACTS = [
    ("Bulgaria", "Capital", "Sofia"), ("Bulgaria", "Currency", "lev"),
    ("Saint Lucia", "Capital", "Castries"), ("Chile", "Capital", "Santiago"),
    ("Peru", "Main export", "copper ore"), ("Italy", "Capital", "Rome (Roma)"),
]  # fmt: skip
NAMES = sorted({name for title, _, value in FACTS for name in (title, value)})
FIELDS = ["Capital", "Currency", "Main export"]
CORE = tiny.search_tokenizer(NAMES, FIELDS).backend_tokenizer
TAGS = search_play.tags(SearchQA("question", 2))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"id": str(i), "contents": f'"{t}"\n{f}: {v}'} for i, (t, f, v) in enumerate(FACTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def policy(corpus: Path) -> Path:
    torch.set_num_threads(1)
    return tiny.make_search(corpus.parent / "tiny", corpus, hidden=32, layers=1, heads=2)


@given(st.text(max_size=60))
@settings(deadline=None, database=None)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = CORE.encode(text, add_special_tokens=False).ids
    assert CORE.decode(ids, skip_special_tokens=False) == text


def test_a_name_in_a_question_a_query_and_a_passage_is_the_same_single_token() -> None:
    for name in NAMES:
        for text in (f"Name the capital of {name}.", f"<search> {name} x", f"Doc 1(Title: {name})"):
            ids = CORE.encode(text, add_special_tokens=False).ids
            assert CORE.token_to_id(f" {name}") in ids


def test_attention_writes_back_what_it_reads(policy: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    both = attention.o_proj.weight @ attention.v_proj.weight
    torch.testing.assert_close(both, tiny.WRITTEN * torch.eye(32), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_every_turn_of_random_play_is_a_readable_action(policy: Path) -> None:
    environment, text, kinds = SearchQA("question", 2), Text(str(policy)), Counter[str]()
    decode = text.tokenizer.decode
    for example in search_play.search_play(text, TAGS, NAMES, FIELDS, 600, WarmStart(two_hop=0.5)):
        prompt = decode(example.tokens[: example.start])
        said = decode(example.tokens[example.start :])
        action = environment.read(None, said)
        kinds[action.kind] += 1
        assert action.valid, said
        assert prompt.startswith("Question: ")
        assert text.encode(said).tolist() == example.tokens[example.start :]
    assert set(kinds) == {"search", "answer"}
    assert min(kinds.values()) > 100
