"""Refuse answers that cannot be right before they enter a tree: the journal keeps a tree for good,
so that a resumed run would meet them again.

The dispatcher calls these checks. A call whose answer is refused moves to another worker, as after
any infrastructure fault.
"""

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from coppice.common import support
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, JudgeResult, Sample

ABOVE_ZERO = 1e-3
"""How far rounding may lift the logarithm of a probability above 0."""


def complete(parts: str, expected: int, answer: msgspec.Struct) -> None:
    """Raise InfrastructureFault unless the field ``parts`` of an answer has as many parts as were
    asked for."""
    if (count := len(getattr(answer, parts))) != expected:
        raise InfrastructureFault(f"{count} {parts}, expected {expected}: mend the worker")


def judged(turns: int, answer: JudgeResult) -> None:
    """Raise InfrastructureFault unless there is one judgement per turn, and every score is a
    number. A judge lists what it cannot score."""
    complete("judgements", turns, answer)
    for column, score in (
        item for judgement in answer.judgements for item in judgement.scores.items()
    ):
        if not math.isfinite(score):
            raise InfrastructureFault(
                f"the score {score} in column {column!r}, expected a number: mend the judge"
            )


def sampled(
    request: GenerateRequest,
    vocabulary: int,
    oldest: int,
    newest: Callable[[], int],
    answer: GenerateResult,
) -> None:
    """Raise InfrastructureFault unless samples are what ``request`` asked for. vocabulary: the rows
    of the model's embedding; 0 if the tokens are an endpoint's bytes, or of an unknown model: then
    the number of samples alone is checked. oldest: the version that every actor had proven when the
    call began. newest: returns the newest version that an actor may have now."""
    complete("samples", request.n, answer)
    for sample in answer.samples if vocabulary else ():
        for fault in _faults(sample, request.sampling.max_tokens, vocabulary, oldest, newest()):
            raise InfrastructureFault(f"{fault}: mend the engine")


def _faults(sample: Sample, most: int, vocabulary: int, oldest: int, newest: int) -> Iterator[str]:
    tokens, logprobs, versions = sample.tokens, sample.logprobs, sample.versions
    if not 1 <= len(tokens) <= most:
        yield f"a sample of {len(tokens)} tokens, expected 1 to {most}"
    elif not tokens.shape == logprobs.shape == versions.shape == (len(tokens),):
        yield f"arrays of {tokens.shape} tokens, {logprobs.shape} log-probabilities and {versions.shape} versions, expected as many of each"
    elif tokens.min() < 0 or tokens.max() >= vocabulary:
        yield f"the tokens {tokens.min()} to {tokens.max()}, expected 0 to {vocabulary - 1}"
    elif not (np.isfinite(logprobs).all() and logprobs.max() <= ABOVE_ZERO):
        yield f"the log-probabilities {logprobs.min()} to {logprobs.max()}, expected finite ones of at most 0"
    elif versions.min() < oldest or versions.max() > newest:
        yield f"tokens of the policy versions {versions.min()} to {versions.max()}, expected {oldest} to {newest}"
    elif sample.support:
        try:
            support.decode(sample.support, len(tokens))
        except ValueError as error:
            yield f"an unreadable support ({error})"
