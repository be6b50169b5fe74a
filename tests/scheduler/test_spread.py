"""Actors whose engines hold other weights than the rest are noticed."""

import pytest

from scheduler.main import most_common


@pytest.mark.parametrize(
    ("proofs", "expected"),
    [
        (["a", "b", "a"], "a"),
        (["", "", "b"], "b"),  # engines without a proof have no say
        (["b", "a"], "b"),
        (["", ""], ""),
        ([], ""),
    ],
)
def test_the_proof_of_most_actors_counts(proofs: list[str], expected: str) -> None:
    assert most_common(proofs) == expected
