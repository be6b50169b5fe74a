"""The tiny search policy and its warm start on random searches."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.environments.base import Action
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults import search_play, tiny
from coppice.tools.defaults.search_play import ensure_search_play
from coppice.tools.defaults.settings import WarmStart

FACTS = [
    ("Bulgaria", "Capital", "Sofia"), ("Bulgaria", "Currency", "lev"),
    ("Saint Lucia", "Capital", "Castries"), ("Chile", "Capital", "Santiago"),
    ("Peru", "Main export", "copper ore"), ("Italy", "Capital", "Rome (Roma)"),
]  # fmt: skip
NAMES = sorted({name for title, _, value in FACTS for name in (title, value)})
FIELDS = ["Capital", "Currency", "Main export"]
WORDS = tiny.search_tokenizer(NAMES, FIELDS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [
        {"id": str(i), "contents": f'"{title}"\n{field}: {value}'}
        for i, (title, field, value) in enumerate(FACTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def policy(corpus: Path) -> Path:
    torch.set_num_threads(1)
    return tiny.make_search(corpus.parent / "tiny", corpus, hidden=32, layers=1, heads=2)


def play(policy: Path, count: int = 600, two_hop: float = 0.5) -> list[Example]:
    notation, config = search_play.tags(SearchQA("question", 2)), WarmStart(two_hop=two_hop)
    return search_play.search_play(Text(str(policy)), notation, NAMES, FIELDS, count, config)


def decoded(policy: Path, example: Example) -> tuple[str, str]:
    decode, start = Text(str(policy)).tokenizer.decode, example.start
    return decode(example.tokens[:start]), decode(example.tokens[start:])


def test_names_and_fields_are_those_of_the_corpus(corpus: Path) -> None:
    assert tiny.names_and_fields(corpus) == (NAMES, FIELDS)


@given(st.text(max_size=60))
@settings(deadline=None, database=None)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    core = WORDS.backend_tokenizer
    ids = core.encode(text, add_special_tokens=False).ids
    assert core.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_question_a_query_and_a_passage_is_the_same_single_token(name: str) -> None:
    core = WORDS.backend_tokenizer
    places = [
        f"Name the capital of {name}.",
        f"<search> {name} capital </search>",
        f"Doc 1(Title: {name}) Capital: x",
    ]
    ids = [core.encode(text, add_special_tokens=False).ids for text in places]
    assert all(core.token_to_id(f" {name}") in found for found in ids)


def test_attention_writes_back_what_it_reads(policy: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    both = attention.o_proj.weight @ attention.v_proj.weight
    torch.testing.assert_close(both, tiny.WRITTEN * torch.eye(32), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_every_turn_of_random_play_is_a_readable_action_in_the_tokens_of_a_rollout(
    policy: Path,
) -> None:
    environment, text = SearchQA("question", 2), Text(str(policy))
    kinds: Counter[str] = Counter()
    for example in play(policy):
        prompt, said = decoded(policy, example)
        action: Action = environment.read(None, said)
        kinds[action.kind] += 1
        assert action.valid, said
        assert prompt.startswith("Question: ")
        assert text.encode(said).tolist() == example.tokens[example.start :]
    assert set(kinds) == {"search", "answer"}
    assert min(kinds.values()) > 100


@pytest.mark.slow
def test_what_random_play_does_is_as_mixed_as_it_says(policy: Path) -> None:
    answers = [decoded(policy, example) for example in play(policy, 3000, two_hop=0.0)]
    shown = [
        (prompt, said) for prompt, said in answers if "<answer>" in said and "Doc 1(" in prompt
    ]
    first = 0
    for prompt, said in shown:
        values = re.findall(
            r"Doc 1\(Title: [^\n]*?\) (?:Capital|Currency|Main export): ([^\n<]*)", prompt
        )
        first += f"<answer> {values[-1]} </answer>" in said
    # The tolerance is wide because names repeat in a small corpus.
    assert first / len(shown) == pytest.approx(search_play.ANSWERED["first"], abs=0.12)


@pytest.mark.slow
def test_the_warm_start_is_cached_by_what_it_depends_on(
    corpus: Path, policy: Path, tmp_path: Path
) -> None:
    def start(**changes: int) -> Path:
        config = WarmStart(**({"steps": 1, "rows": 4} | changes))
        return ensure_search_play(
            policy, corpus, search_play.tags(SearchQA("question", 2)), config, tmp_path, 1
        )

    assert start(steps=0) == policy
    made = start()
    assert made != policy
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert start() == made
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert start(rows=5) != made
