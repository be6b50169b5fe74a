"""A streamed text: whatever the tokens, its pieces are the whole text, and none shows what must not
be seen yet."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.actors.serving.answers import Pieces
from tests import tiny

SPECIAL = 258


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    folder = tiny.save(tmp_path_factory.mktemp("pieces") / "tiny")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def streamed(
    words: tokenizers.Tokenizer, tokens: list[int], stops: list[str]
) -> tuple[list[str], Pieces]:
    pieces = Pieces(words, stops)
    return [*(pieces.feed(token, -1.0) for token in tokens), pieces.finish()], pieces


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, SPECIAL), max_size=30))
def test_the_pieces_are_the_text_of_tokens(words: tokenizers.Tokenizer, tokens: list[int]) -> None:
    assert "".join(streamed(words, tokens, [])[0]) == words.decode(tokens, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("aé日🌲b", max_size=20),
    stops=st.lists(st.text("aé日b", min_size=1, max_size=4), max_size=3),
)
def test_the_pieces_end_where_the_first_stop_string_begins(
    words: tokenizers.Tokenizer, text: str, stops: list[str]
) -> None:
    made, pieces = streamed(words, words.encode(text, add_special_tokens=False).ids, stops)
    # Token by token, the text that ends with the earliest completed stop string.
    grown = next(
        (text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)),
        text,
    )
    assert (
        "".join(made)
        == grown[: min((grown.find(stop) for stop in stops if stop in grown), default=len(grown))]
    )
    assert pieces.stopped == any(stop in text for stop in stops)
    for piece in made:
        assert "\ufffd" not in piece
        assert all(stop not in piece for stop in stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=2, max_size=4))
def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else(
    words: tokenizers.Tokenizer, text: str, stop: str
) -> None:
    pieces, shown = Pieces(words, [stop]), ""
    for end, token in enumerate(words.encode(text, add_special_tokens=False).ids, 1):
        shown += pieces.feed(token, 0.0)
        if pieces.stopped:
            break
        held = text[len(shown) : end]
        assert stop.startswith(held)
        longer = [
            text[start:end] for start in range(len(shown)) if stop.startswith(text[start:end])
        ]
        assert not longer


def test_every_token_is_told_once_with_its_place_in_the_text(words: tokenizers.Tokenizer) -> None:
    _, pieces = streamed(words, words.encode("aéb").ids, [])
    told = pieces.take()
    assert [token.text for token in told] == ["a", "\ufffd", "\ufffd", "b"]
    assert [token.offset for token in told] == [0, 1, 1, 2]
    assert pieces.take() == []


def test_the_most_probable_tokens_are_told_by_their_text(words: tokenizers.Tokenizer) -> None:
    a, b = words.encode("ab").ids
    pieces = Pieces(words, [])
    pieces.feed(a, -2.0, {b: -0.5, SPECIAL: -1.0, a: -2.0})
    pieces.feed(b, -0.1)
    assert [token.top for token in pieces.take()] == [
        [("b", -0.5), ("<pad>", -1.0), ("a", -2.0)],
        [],
    ]
