"""Constrained decoding: whatever is sampled under the mask matches the constraint, and a bad
constraint is named."""

import re
from typing import Annotated, Any, Literal

import msgspec
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.engines.grammar import Grammar, Matcher
from coppice.wire.faults import DataFault
from coppice.wire.messages import Constraint
from tests import tiny

END, OTHER_END, VOCABULARY = 257, 258, 272
"""More logits than the tokenizer has words, as padded embeddings have."""

PATTERNS = [
    r"<explanation>[^<]{0,200}</explanation>\s*<score>(\+1|0|-1)</score>",
    r"(日本|é|🌲){2,4}",
    r"[ж-щ]{1,5}!?",
    r"[^a]{1,6}",
    r".{0,12}x",
    r"(?i:stop)|[0-9]+(\.[0-9]{1,2})?",
    r"",
]


class Grade(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(max_length=8)]
    tags: Annotated[list[Literal["a", "b"]], msgspec.Meta(max_length=2)] = []


GRADE = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["reason"],
    "additionalProperties": False,
}
SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    (GRADE, Grade),
    ({"type": "integer", "minimum": -5, "maximum": 70}, Annotated[int, msgspec.Meta(ge=-5, le=70)]),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    folder = tiny.save(tmp_path_factory.mktemp("grammar") / "tiny")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammar(words: tokenizers.Tokenizer) -> Grammar:
    return Grammar(words, VOCABULARY, frozenset({END, OTHER_END}))


def sampled(matcher: Matcher, seed: int, longest: int = 1500, ending: float = 0.0) -> list[int]:
    """Tokens of a random model under the mask, up to and with its end token. ending: added to the
    end tokens' logits."""
    random, tokens = torch.Generator().manual_seed(seed), list[int]()
    while len(tokens) < longest and not matcher.done:
        logits = torch.randn(VOCABULARY, generator=random) * 2
        logits[[END, OTHER_END]] += ending
        matcher.mask(logits)
        tokens.append(int(logits.softmax(-1).multinomial(1, generator=random)))
        matcher.accept(tokens[-1])
        if tokens[-1] in (END, OTHER_END):
            break
    assert not matcher.problem
    assert len(tokens) < longest, "never ended"
    return tokens


def allowed(matcher: Matcher) -> list[int]:
    """The tokens that may come next."""
    return matcher.allowed(VOCABULARY).nonzero()[0].tolist()


def text_of(words: tokenizers.Tokenizer, tokens: list[int]) -> str:
    return words.decode(
        [token for token in tokens if token not in (END, OTHER_END)], skip_special_tokens=False
    )


@settings(max_examples=60, deadline=None)
@given(pattern=st.sampled_from(PATTERNS), seed=st.integers(0, 2**31))
def test_every_sampled_text_matches_the_regex(
    grammar: Grammar, words: tokenizers.Tokenizer, pattern: str, seed: int
) -> None:
    made = text_of(words, sampled(grammar.matcher(Constraint("regex", pattern)), seed, ending=3.0))
    assert re.fullmatch(pattern, made), made


@settings(max_examples=30, deadline=None)
@given(case=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**31))
def test_every_sampled_text_validates_against_the_json_schema(
    grammar: Grammar, words: tokenizers.Tokenizer, case: tuple[dict[str, Any], Any], seed: int
) -> None:
    schema, kind = case
    matcher = grammar.matcher(Constraint("json_schema", msgspec.json.encode(schema).decode()))
    msgspec.json.decode(text_of(words, sampled(matcher, seed)), type=kind)


@settings(max_examples=30, deadline=None)
@given(written=st.from_regex(PATTERNS[0].replace(r"\s", r"[ \r\n\t\u2003]"), fullmatch=True))
def test_no_text_that_matches_is_forbidden(
    grammar: Grammar, words: tokenizers.Tokenizer, written: str
) -> None:
    matcher = grammar.matcher(Constraint("regex", PATTERNS[0]))
    for token in words.encode(written, add_special_tokens=False).ids:
        assert token in allowed(matcher)
        matcher.accept(token)
    assert END in allowed(matcher)


def test_an_end_token_is_allowed_exactly_where_a_match_may_end(
    grammar: Grammar, words: tokenizers.Tokenizer
) -> None:
    matcher, a = grammar.matcher(Constraint("regex", "aab?")), words.encode("a").ids[0]
    ends = []
    for token in (a, a, words.encode("b").ids[0]):
        assert not matcher.done
        ends.append({END, OTHER_END} <= set(allowed(matcher)))
        matcher.accept(token)
    assert ends == [False, False, True]
    assert matcher.done
    assert allowed(matcher) == [END, OTHER_END]


def test_a_special_token_never_stands_for_its_text(grammar: Grammar) -> None:
    matcher = grammar.matcher(Constraint("regex", "<s>|<unk>"))
    assert not {256, 259} & set(allowed(matcher))


def test_a_copy_goes_its_own_way(grammar: Grammar, words: tokenizers.Tokenizer) -> None:
    a, b = words.encode("a").ids[0], words.encode("b").ids[0]
    one = grammar.matcher(Constraint("regex", "(ab|ba)"))
    other = one.copy()
    one.accept(a)
    assert allowed(one) == [b]
    assert allowed(other) == sorted((a, b))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_mask_works_in_place_on_every_kind_of_float(
    grammar: Grammar, words: tokenizers.Tokenizer, kind: torch.dtype
) -> None:
    rows = torch.zeros(2, VOCABULARY, dtype=kind)
    grammar.matcher(Constraint("regex", "a|b")).mask(rows[1])
    allowed = [words.encode(letter).ids[0] for letter in "ab"]
    assert torch.isfinite(rows[1]).nonzero()[:, 0].tolist() == allowed
    assert torch.isfinite(rows[0]).all()


def test_a_match_that_is_given_up_allows_the_end_alone_and_says_why(
    grammar: Grammar, words: tokenizers.Tokenizer
) -> None:
    matcher = grammar.matcher(Constraint("regex", "aaa"))
    matcher.accept(words.encode("b").ids[0])
    logits = torch.zeros(VOCABULARY)
    matcher.mask(logits)
    assert torch.isfinite(logits).nonzero()[:, 0].tolist() == [END, OTHER_END]
    assert matcher.done
    assert "b" in matcher.problem


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", r"[^\s\S]", "no text"),
        ("regex", "(" * 300 + "a" + ")" * 300, "nested"),
        ("regex", "a" * 60_000, "too many"),
        ("json_schema", "{", "JSON object"),
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


def test_a_model_without_an_end_token_is_told_that_it_cannot_end_a_match(
    words: tokenizers.Tokenizer,
) -> None:
    with pytest.raises(DataFault, match="eos_token_id"):
        Grammar(words, VOCABULARY, frozenset()).matcher(Constraint("regex", "a"))


def test_a_smaller_vocabulary_is_cut(words: tokenizers.Tokenizer) -> None:
    logits = torch.zeros(100)
    Grammar(words, 100, frozenset({END})).matcher(Constraint("regex", "a|b")).mask(logits)
    assert torch.isfinite(logits).sum() == 2
