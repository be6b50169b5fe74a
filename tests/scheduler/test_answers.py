"""Answers that cannot be right never enter a tree."""

from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.common import support
from coppice.scheduler.dispatch.weight_sync import Versions
from coppice.scheduler.growth import answers
from coppice.wire import messages as wire
from coppice.wire.faults import InfrastructureFault

TOKENS, VERSIONS = np.array([5, 6], np.int32), np.array([3, 4], np.int32)
LOGPROBS = np.array([-1.0, -2.0], np.float32)


def check(sample: wire.Sample, vocabulary: int = 7) -> None:
    request = wire.GenerateRequest(np.zeros(1, np.int32), 1, wire.Sampling(2))
    result = wire.GenerateResult([sample], 1, 0)
    answers.sampled(request, vocabulary, 3, Versions(newest=4), result)


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict.fromkeys(("tokens", "logprobs", "versions"), TOKENS[:0]), "a sample of 0 tokens"),
    (dict.fromkeys(("tokens", "versions"), np.resize(VERSIONS, 3)), r"\(2,\) log-probabilities"),
    (
        {
            "tokens": np.resize(TOKENS, 3),
            "logprobs": np.resize(LOGPROBS, 3),
            "versions": np.resize(VERSIONS, 3),
        },
        "a sample of 3 tokens, expected 1 to 2",
    ),
    (dict.fromkeys(("tokens", "logprobs", "versions"), np.array(5)), r"arrays of \(\) tokens"),
    ({"tokens": TOKENS.astype(np.float32)}, "float32 tokens of int32 versions, expected integers"),
    ({"logprobs": LOGPROBS[:1]}, r"arrays of \(2,\) tokens, \(1,\) log-probabilities"),
    ({"versions": VERSIONS[:1]}, r"\(1,\) versions"),
    ({"tokens": TOKENS + 1}, "the tokens 6 to 7, expected 0 to 6"),
    ({"tokens": TOKENS - 6}, "the tokens -1 to 0, expected 0 to 6"),
    ({"logprobs": LOGPROBS * np.float32("nan")}, "the log-probabilities nan to nan"),
    ({"logprobs": -LOGPROBS}, "the log-probabilities 1.0 to 2.0"),
    ({"versions": VERSIONS + 1}, "policy versions 4 to 5, expected 3 to 4"),
    ({"versions": VERSIONS - 1}, "policy versions 2 to 3, expected 3 to 4"),
    ({"support": b"\xff"}, "an unreadable support"),
    ({"support": support.encode([[5, 6], [5]])}, "a token that its own support lacks"),
    ({"experts": np.zeros((2, 1), np.float32)}, "float32 experts"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_sample_that_cannot_be_right_is_refused(wrong: dict[str, Any], message: str) -> None:
    sample = wire.Sample(TOKENS, LOGPROBS, VERSIONS, "stop")
    with pytest.raises(InfrastructureFault, match=message):
        check(msgspec.structs.replace(sample, **wrong))


def test_the_bytes_of_an_endpoints_reply_are_no_tokens_and_may_be_none_or_many() -> None:
    for count in (0, 400):
        none = np.zeros(count, np.int32)
        check(wire.Sample(none, none.astype(np.float32), none, "stop"), vocabulary=0)


def test_too_few_judgements_are_refused() -> None:
    fine = wire.Judgement({"outcome": 1.0}, ["think"])
    answers.complete("judgements", 2, wire.JudgeResult([fine, fine]))
    with pytest.raises(InfrastructureFault, match="1 judgements, expected 2"):
        answers.complete("judgements", 2, wire.JudgeResult([fine]))
