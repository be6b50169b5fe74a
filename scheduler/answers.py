"""Refuse answers of workers that cannot be right, before they enter a tree: the journal keeps a tree for good, so a resumed run would meet them again."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wire import support
from wire.faults import InfrastructureFault
from wire.messages import GenerateRequest, GenerateResult, Sample

ABOVE_ZERO = 1e-3
"""How far rounding may lift the logarithm of a probability above 0."""


def complete(service: str, parts: str, answer: Sequence[Any], expected: int) -> None:
    """Raise InfrastructureFault if a worker answered with too few or too many parts, so that the tree is tried again."""
    if len(answer) != expected:
        raise InfrastructureFault(f"{service} answered {len(answer)} {parts}, expected {expected}: mend the worker")


def sampled(request: GenerateRequest, result: GenerateResult, vocabulary: int, newest: int) -> None:
    """Raise InfrastructureFault if samples are not what ``request`` asked for. vocabulary: the rows of the model's embedding, 0 if unknown.
    newest: the newest version that an actor may have."""
    complete("generate", "samples", result.samples, request.n)
    for sample in result.samples:
        for fault in _faults(sample, request.sampling.max_tokens, vocabulary, newest):
            raise InfrastructureFault(f"generate answered {fault}: mend the engine")


def _faults(sample: Sample, most: int, vocabulary: int, newest: int) -> Iterator[str]:
    tokens, logprobs, versions = sample.tokens, sample.logprobs, sample.versions
    if not 1 <= len(tokens) <= most:
        yield f"a sample of {len(tokens)} tokens, expected 1 to {most}"
    elif not tokens.shape == logprobs.shape == versions.shape == (len(tokens),):
        yield f"arrays of {tokens.shape} tokens, {logprobs.shape} log-probabilities and {versions.shape} versions, expected as many of each"
    elif tokens.min() < 0 or (vocabulary and tokens.max() >= vocabulary):
        yield f"the tokens {tokens.min()} to {tokens.max()}, expected 0 to {vocabulary - 1}"
    elif not (np.isfinite(logprobs).all() and logprobs.max() <= ABOVE_ZERO):
        yield f"the log-probabilities {logprobs.min()} to {logprobs.max()}, expected finite ones of at most 0"
    elif versions.min() < 0 or versions.max() > newest:
        yield f"tokens of the policy versions {versions.min()} to {versions.max()}, expected 0 to {newest}"
    elif sample.support:
        try:
            support.decode(sample.support, len(tokens))
        except ValueError as error:
            yield f"an unreadable support ({error})"
