"""The compact form of what top-p and top-k left."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.common.support import Support, decode, encode, joined, spliced

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20, unique=True)


@given(st.lists(ids, min_size=1, max_size=8))
def test_a_support_comes_back_ascending(left: list[list[int]]) -> None:
    support = decode(encode(left), len(left))
    if support is None:
        assert not any(left) and encode(left) == b""
        return
    assert support.counts.tolist() == [len(row) for row in left]
    assert support.ids.tolist() == [token for row in left for token in sorted(row)]


@pytest.mark.parametrize("places", [1, 3])
def test_a_support_of_another_number_of_tokens_is_refused(places: int) -> None:
    with pytest.raises(ValueError, match="sampled tokens: expected"):
        decode(encode([[1, 2], [3]]), places)


@pytest.mark.parametrize("blob", [b"\x80", b"\x01\x80", b"\x01\xff\xff\xff\xff\xff\x01"])
def test_numbers_that_do_not_end_or_are_too_long_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="expected numbers"):
        decode(blob, 1)


@given(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=5))
def test_joined_supports_are_those_of_the_stretches(stretches: list[list[list[int]]]) -> None:
    parts = [decode(encode(stretch), len(stretch)) for stretch in stretches]
    whole = joined(parts, list(map(len, stretches)))
    rows = [row for stretch in stretches for row in stretch]
    both = decode(encode(rows), len(rows))
    assert (whole is None) == (both is None)
    if whole is not None and both is not None:
        np.testing.assert_array_equal(whole.counts, both.counts)
        np.testing.assert_array_equal(whole.ids, both.ids)


def test_has_says_at_which_places_a_token_was_left() -> None:
    support = Support(np.array([2, 0, 1]), np.array([4, 7, 5]))
    assert support.has(np.array([7, 99, 5])).tolist() == [True, True, True]
    assert support.has(np.array([5, 99, 4])).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("first", "second"),
    [([[1, 5], [], [7]], [[2], [3, 9]]), ([[], [], []], [[2], []]), ([[4], [], [6]], [[], []])],
)
@pytest.mark.parametrize("kept", [0, 2, 3])
def test_a_forked_action_has_the_support_of_what_it_kept_and_of_what_was_sampled(
    first: list[list[int]], second: list[list[int]], kept: int
) -> None:
    assert spliced(encode(first), 3, kept, encode(second), 2) == encode(first[:kept] + second)
