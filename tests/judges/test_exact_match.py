"""The exact match of a run's turns: no answer is never right, whatever the gold."""

import pytest

from coppice.judges.exact_match import ExactMatch
from coppice.wire.messages import JudgedTurn


async def scores(answer: str | None, gold: str) -> dict[str, float]:
    (made,) = await ExactMatch().score([JudgedTurn("q", [gold], "", "", 1, 4, answer=answer)])
    return made.scores


@pytest.mark.parametrize("gold", ["Sofia", "A", "The", "!!!"])
async def test_no_answer_scores_zero_even_where_the_gold_is_an_article_or_punctuation(
    gold: str,
) -> None:
    assert await scores(None, gold) == {"outcome": 0, "f1": 0}
    assert await scores("Rome", gold) == {"outcome": 0, "f1": 0}


async def test_an_answer_that_was_given_equals_a_gold_of_the_same_normal_form() -> None:
    """methods.md 1.7: both are empty once normalised."""
    assert (await scores("the", "A"))["outcome"] == 1
    assert (await scores("", "A"))["outcome"] == 1
    assert (await scores("", "Sofia"))["outcome"] == 0
