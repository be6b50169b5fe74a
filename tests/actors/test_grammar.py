"""Constrained decoding: whatever is sampled under the mask matches the constraint, and a bad
constraint is named."""

import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.engines.grammar import Grammar, Matcher
from coppice.wire.faults import DataFault
from coppice.wire.messages import Constraint

END, OTHER_END, VOCABULARY = 257, 258, 272
"""More logits than the tokenizer has words, as padded embeddings have."""

PATTERNS = [
    r"<explanation>[^<]{0,200}</explanation>\s*<score>(\+1|0|-1)</score>",
    r"(日本|é|🌲){2,4}",
    r"[^a]{1,6}",
    r".{0,12}x",
    r"(?i:stop)|[0-9]+(\.[0-9]{1,2})?",
    r"",
]


@pytest.fixture(scope="module")
def words(llama: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(llama / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammar(words: tokenizers.Tokenizer) -> Grammar:
    return Grammar(words, VOCABULARY, frozenset({END, OTHER_END}))


def sampled(matcher: Matcher, seed: int, longest: int = 1500) -> list[int]:
    """Tokens of a random model under the mask, before its end token."""
    random, tokens = torch.Generator().manual_seed(seed), list[int]()
    while len(tokens) < longest and not matcher.done:
        logits = torch.randn(VOCABULARY, generator=random) * 2
        logits[[END, OTHER_END]] += 3.0
        matcher.mask(logits)
        tokens.append(int(logits.softmax(-1).multinomial(1, generator=random)))
        matcher.accept(tokens[-1])
        if tokens[-1] in (END, OTHER_END):
            tokens.pop()
            break
    assert not matcher.problem
    assert len(tokens) < longest, "never ended"
    return tokens


def allowed(matcher: Matcher, vocabulary: int = VOCABULARY) -> list[int]:
    logits = torch.zeros(vocabulary)
    matcher.mask(logits)
    return torch.isfinite(logits).nonzero()[:, 0].tolist()


@settings(max_examples=60, deadline=None)
@given(pattern=st.sampled_from(PATTERNS), seed=st.integers(0, 2**31))
def test_every_sampled_text_matches_the_regex(
    grammar: Grammar, words: tokenizers.Tokenizer, pattern: str, seed: int
) -> None:
    tokens = sampled(grammar.matcher(Constraint("regex", pattern)), seed)
    written = words.decode(tokens, skip_special_tokens=False)
    assert re.fullmatch(pattern, written), written


def test_an_end_is_allowed_exactly_where_a_match_may_end_and_no_special_token_for_its_text(
    grammar: Grammar, words: tokenizers.Tokenizer
) -> None:
    matcher, (a, b) = grammar.matcher(Constraint("regex", "aab?|<s>")), words.encode("ab").ids
    assert not {256, END} & set(allowed(matcher))
    for token, after in ((a, [a]), (a, [b, END, OTHER_END]), (b, [END, OTHER_END])):
        assert not matcher.done
        matcher.accept(token)
        assert allowed(matcher) == after
    assert matcher.done
    smaller = Grammar(words, 100, frozenset({END})).matcher(Constraint("regex", "a|b"))
    assert allowed(smaller, 100) == [a, b]


def test_a_match_that_is_given_up_allows_the_end_alone_and_says_why(
    grammar: Grammar, words: tokenizers.Tokenizer
) -> None:
    matcher = grammar.matcher(Constraint("regex", "aaa"))
    matcher.accept(words.encode("b").ids[0])
    assert allowed(matcher) == [END, OTHER_END]
    assert matcher.done and "b" in matcher.problem


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", r"[^\s\S]", "no text"),
        ("regex", "a" * 60_000, "too many"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x.json"}', "does not fetch"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_a_data_fault_that_names_the_problem(
    grammar: Grammar, kind: Any, text: str, reason: str
) -> None:
    with pytest.raises(DataFault, match=f"{kind.replace('_', ' ')}.*{reason}") as caught:
        grammar.matcher(Constraint(kind, text))
    assert len(str(caught.value)) < 600


def test_without_an_end_token_a_constraint_is_refused(words: tokenizers.Tokenizer) -> None:
    with pytest.raises(DataFault, match="eos_token_id"):
        Grammar(words, VOCABULARY, frozenset()).matcher(Constraint("regex", "a"))
