"""The model of the actors' prefix caches, against a set of prefixes that cannot be wrong."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.dispatch.residency import Prefixes, Residency

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=12))
def test_a_cache_without_bounds_holds_exactly_the_prefixes_of_what_was_inserted(
    sequences: list[list[int]], asked: list[int]
) -> None:
    cache, prefixes = Prefixes(), {()}
    for tokens in sequences:
        cache.insert(packed(tokens))
        prefixes |= {tuple(tokens[:end]) for end in range(len(tokens) + 1)}
        assert cache.match(packed(tokens)) == len(tokens)
    assert cache.bytes // 4 == len(prefixes) - 1
    assert cache.match(packed(asked)) == max(
        end for end in range(len(asked) + 1) if tuple(asked[:end]) in prefixes
    )


@given(SEQUENCES, st.integers(1, 30))
def test_a_bounded_cache_never_holds_more_than_its_capacity_and_keeps_what_was_used_last(
    sequences: list[list[int]], capacity: int
) -> None:
    cache = Prefixes(4 * capacity)
    for tokens in sequences:
        cache.insert(packed(tokens))
        assert cache.bytes // 4 <= capacity
        if len(tokens) <= capacity:
            assert cache.match(packed(tokens)) == len(tokens)


def test_the_least_recently_used_branch_goes_first_and_the_trunk_last() -> None:
    cache = Prefixes(40)
    cache.insert(packed([0, 0, 0, 0, 1, 1]))
    cache.insert(packed([0, 0, 0, 0, 2, 2]))
    cache.insert(packed([0, 0, 0, 0, 1, 1]))
    cache.insert(packed([0, 0, 0, 0, 3, 3, 3]))
    assert cache.match(packed([0, 0, 0, 0, 2, 2])) == 4
    assert cache.match(packed([0, 0, 0, 0, 1, 1])) == 6
    assert cache.bytes // 4 == 9


def test_a_prompt_counts_as_resident_from_the_moment_it_is_sent_but_for_its_last_token() -> None:
    residency = Residency()
    assert residency.started("a", packed([1, 2, 3])) == 0
    assert residency.expect("a", packed([1, 2, 3])) == 2
    assert residency.expect("a", packed([1, 2, 3, 4])) == 3
    assert residency.expect("b", packed([1, 2, 3])) == 0


def test_a_sample_of_older_weights_is_not_resident_and_new_weights_empty_a_cache() -> None:
    residency = Residency()
    residency.sampled("a", packed([1, 2, 3]), 0)
    assert residency.expect("a", packed([1, 2, 3, 4])) == 3
    residency.emptied("a", 1)
    assert residency.expect("a", packed([1, 2, 3, 4])) == 0
    residency.sampled("a", packed([1, 2, 3]), 0)
    assert residency.expect("a", packed([1, 2, 3, 4])) == 0
    residency.sampled("a", packed([1, 2]), 2)  # weights that nobody told of
    residency.sampled("a", packed([5]), 1)
    assert residency.expect("a", packed([1, 2, 9])) == 2
    assert residency.expect("a", packed([5, 9])) == 0


def test_the_forecast_is_shares_of_the_prompt_tokens_since_it_was_taken() -> None:
    residency = Residency()
    residency.compare(100, 80, 60)
    residency.compare(100, 40, 40)
    assert residency.take() == {
        "cache/prompt_tokens": 200.0,
        "cache/hit_rate": 0.5,
        "cache/predicted_hit_rate": 0.6,
        "cache/prediction_error": 0.1,
    }
    assert residency.take() == {}
