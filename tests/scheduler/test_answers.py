"""Answers that cannot be right never enter a tree."""

import numpy as np
import pytest

from coppice.scheduler.dispatch.weight_sync import Versions
from coppice.scheduler.growth import answers
from coppice.wire import messages as wire
from coppice.wire.faults import InfrastructureFault

TOKENS, VERSIONS = np.array([5, 6], np.int32), np.array([3, 4], np.int32)
LOGPROBS = np.array([-1.0, -2.0], np.float32)


def check(*samples: wire.Sample, n: int = 1, vocabulary: int = 7) -> None:
    request = wire.GenerateRequest(np.zeros(1, np.int32), n, wire.Sampling(2))
    answers.sampled(
        request, vocabulary, 3, Versions(newest=4), wire.GenerateResult(list(samples), 1, 0)
    )


WRONG = [
    (TOKENS[:0], LOGPROBS[:0], VERSIONS[:0], "a sample of 0 tokens, expected 1 to 2"),
    (*(np.resize(each, 3) for each in (TOKENS, LOGPROBS, VERSIONS)), "a sample of 3 tokens"),
    (TOKENS, LOGPROBS[:1], VERSIONS, r"arrays of \(2,\) tokens, \(1,\) log-probabilities"),
    (TOKENS, LOGPROBS, VERSIONS[:1], r"\(1,\) versions"),
    (TOKENS + 1, LOGPROBS, VERSIONS, "the tokens 6 to 7, expected 0 to 6"),
    (TOKENS - 6, LOGPROBS, VERSIONS, "the tokens -1 to 0, expected 0 to 6"),
    (TOKENS, LOGPROBS * np.float32("nan"), VERSIONS, "the log-probabilities nan to nan"),
    (TOKENS, -LOGPROBS, VERSIONS, "the log-probabilities 1.0 to 2.0"),
    (TOKENS, LOGPROBS, VERSIONS + 1, "policy versions 4 to 5, expected 3 to 4"),
    (TOKENS, LOGPROBS, VERSIONS - 1, "policy versions 2 to 3, expected 3 to 4"),
]


@pytest.mark.parametrize(("tokens", "logprobs", "versions", "message"), WRONG)
def test_a_sample_that_cannot_be_right_is_refused_and_named(
    tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, message: str
) -> None:
    with pytest.raises(InfrastructureFault, match=message):
        check(wire.Sample(tokens, logprobs, versions, "stop"))


def test_a_support_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InfrastructureFault, match="an unreadable support"):
        check(wire.Sample(TOKENS, LOGPROBS, VERSIONS, "stop", support=b"\xff"))


def test_the_bytes_of_an_endpoints_reply_are_no_tokens_and_may_be_none_or_many() -> None:
    for count in (0, 400):
        none = np.zeros(count, np.int32)
        check(wire.Sample(none, none.astype(np.float32), none, "stop"), vocabulary=0)


def test_too_few_judgements_and_a_score_that_is_no_number_are_refused() -> None:
    fine = wire.Judgement({"outcome": 1.0}, ["think"])
    answers.judged(2, wire.JudgeResult([fine, fine]))
    with pytest.raises(InfrastructureFault, match="1 judgements, expected 2"):
        answers.judged(2, wire.JudgeResult([fine]))
    told = "the score nan in column 'outcome', expected a number"
    with pytest.raises(InfrastructureFault, match=told):
        answers.judged(2, wire.JudgeResult([fine, wire.Judgement({"outcome": float("nan")})]))
