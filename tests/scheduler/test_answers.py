"""Answers that cannot be right never enter a tree."""

import numpy as np
import pytest

from coppice.scheduler.dispatch.weight_sync import Versions
from coppice.scheduler.growth import answers
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import (
    GenerateRequest,
    GenerateResult,
    Judgement,
    JudgeResult,
    Sample,
    Sampling,
)

TOKENS, LOGPROBS, VERSIONS = (
    np.array([5, 6], np.int32),
    np.array([-1.0, -2.0], np.float32),
    np.array([3, 4], np.int32),
)


def check(*samples: Sample, n: int = 1, vocabulary: int = 7) -> None:
    request = GenerateRequest(np.zeros(1, np.int32), n, Sampling(2))
    answers.sampled(request, vocabulary, 3, Versions(newest=4), GenerateResult(list(samples), 1, 0))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            Sample(TOKENS[:0], LOGPROBS[:0], VERSIONS[:0], "stop"),
            "a sample of 0 tokens, expected 1 to 2",
        ),
        (
            Sample(np.resize(TOKENS, 3), np.resize(LOGPROBS, 3), np.resize(VERSIONS, 3), "stop"),
            "a sample of 3 tokens",
        ),
        (
            Sample(TOKENS, LOGPROBS[:1], VERSIONS, "stop"),
            r"arrays of \(2,\) tokens, \(1,\) log-probabilities",
        ),
        (Sample(TOKENS, LOGPROBS, VERSIONS[:1], "stop"), r"\(1,\) versions"),
        (Sample(TOKENS + 1, LOGPROBS, VERSIONS, "stop"), "the tokens 6 to 7, expected 0 to 6"),
        (Sample(TOKENS - 6, LOGPROBS, VERSIONS, "stop"), "the tokens -1 to 0, expected 0 to 6"),
        (
            Sample(TOKENS, LOGPROBS * np.float32("nan"), VERSIONS, "stop"),
            "the log-probabilities nan to nan",
        ),
        (Sample(TOKENS, -LOGPROBS, VERSIONS, "stop"), "the log-probabilities 1.0 to 2.0"),
        (Sample(TOKENS, LOGPROBS, VERSIONS + 1, "stop"), "policy versions 4 to 5, expected 3 to 4"),
        (Sample(TOKENS, LOGPROBS, VERSIONS - 1, "stop"), "policy versions 2 to 3, expected 3 to 4"),
        (Sample(TOKENS, LOGPROBS, VERSIONS, "stop", support=b"\xff"), "an unreadable support"),
    ],
)
def test_a_sample_that_cannot_be_right_is_refused_and_named(sample: Sample, message: str) -> None:
    with pytest.raises(InfrastructureFault, match=message):
        check(sample)


def test_the_bytes_of_an_endpoints_reply_are_no_tokens_and_may_be_none_or_many() -> None:
    for count in (0, 400):
        none = np.zeros(count, np.int32)
        check(Sample(none, none.astype(np.float32), none, "stop"), vocabulary=0)


def test_too_few_judgements_and_a_score_that_is_no_number_are_refused() -> None:
    fine = Judgement({"outcome": 1.0}, ["think"])
    answers.judged(2, JudgeResult([fine, fine]))
    with pytest.raises(InfrastructureFault, match="1 judgements, expected 2"):
        answers.judged(2, JudgeResult([fine]))
    with pytest.raises(
        InfrastructureFault, match="the score nan in column 'outcome', expected a number"
    ):
        answers.judged(2, JudgeResult([fine, Judgement({"outcome": float("nan")})]))
