"""No input ends a parser in another way than by its own error; the search that says so finds a
planted bug."""

import json

import pytest

from tests.fuzz import targets
from tests.fuzz.search import search
from tests.fuzz.targets import TARGETS, seeds

COUNT = {"settings": 60, "http_chat": 300, "actions": 300}


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_corpus_end_in_an_answer_or_in_the_parsers_own_error(name: str) -> None:
    inputs = seeds(name)
    most = len(inputs) + COUNT.get(name, 500)
    count, findings = search(TARGETS[name], inputs, seed=17, most=most)
    assert (count, findings) == (most, {})


def test_every_seed_is_read_by_its_parser() -> None:
    """A seed that is refused at its first byte would test nothing: without the suppression of its
    refusals no wire seed raises."""
    for data in targets.built("wire_header"):
        targets.arrays.decode_header(targets.frames(data))
    for data in targets.built("journal_node"):
        targets.decode_node(data)
    for data in targets.built("rank_batch"):
        targets.unpack_batch(data)
    scores = [targets.parse_score(d.decode("utf-8", "replace")) for d in seeds("judge_replies")]
    assert 1.0 in scores


def test_the_search_finds_a_planted_bug_in_a_decoder_and_in_a_parser_of_text() -> None:
    def decoder(data: bytes) -> None:
        targets.wire_header(data)
        if len(data) > 3 and data[2] >= 0xF0:
            raise IndexError("planted")

    def parser(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        if text.count("<score>") > 1:
            json.loads(text)

    for target, name in ((decoder, "wire_header"), (parser, "judge_replies")):
        _, findings = search(target, seeds(name), seed=0, most=4000)
        assert findings, name
        for data in findings.values():
            with pytest.raises((IndexError, ValueError)):
                target(data)
