"""Refuse answers that cannot be right before they enter a tree, which the journal keeps for good.
The dispatcher then asks another worker, as after any infrastructure fault."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from coppice.common import support
from coppice.common.numbers import LARGEST
from coppice.scheduler.dispatch.weight_sync import Versions
from coppice.wire.faults import InfrastructureFault, Refused
from coppice.wire.messages import GenerateRequest, GenerateResult, Sample

ABOVE_ZERO = 1e-3
"""How far rounding may lift the logarithm of a probability above 0."""


def complete(parts: str, expected: int, answer: msgspec.Struct) -> None:
    """Raise Refused unless the field ``parts`` has as many parts as were asked for."""
    if (count := len(getattr(answer, parts))) != expected:
        raise Refused(f"{count} {parts}, expected {expected}: mend the worker")


def given(name: str, scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores that the environment ``name`` gave, as floats. Raises ValueError for one
    that is no number or too large: nothing later looks for it again."""
    numbers = {}
    for column, score in scores.items():
        try:
            numbers[column] = math.nan if isinstance(score, str | bytes) else float(score)
        except (TypeError, ValueError):
            numbers[column] = math.nan
        if not abs(numbers[column]) <= LARGEST:  # NaN compares as False
            odd = f"the score {score!r} in column {column!r}, expected a number"
            raise ValueError(f"the environment {name} gave {odd} of at most {LARGEST:g}: mend it")
    return numbers


def sampled(
    request: GenerateRequest, vocabulary: int, oldest: int, versions: Versions,
    answer: GenerateResult,
) -> None:  # fmt: skip
    """Raise InfrastructureFault unless samples are what ``request`` asked for. vocabulary: the rows
    of the embedding; 0 for an endpoint's bytes, of which the number of samples alone is checked.
    oldest: what every actor had proven when the call began; versions: what actors may have now."""
    complete("samples", request.n, answer)
    for sample in answer.samples if vocabulary else ():
        fault = _fault(sample, request.sampling.max_tokens, vocabulary, oldest, versions.newest)
        if not fault and sample.experts is not None:
            rows = len(request.tokens) + len(sample.tokens) - 1 - request.sampling.experts_from
            shape, kind = sample.experts.shape, sample.experts.dtype
            if kind.kind not in "iu" or len(shape) != 2 or shape[0] != rows:
                fault = f"{kind} experts of shape {shape}, expected {rows} rows of integers"
        if fault:
            raise InfrastructureFault(f"{fault}: mend the engine")


def _fault(sample: Sample, most: int, vocabulary: int, oldest: int, newest: int) -> str:
    """What is wrong with a sample, or ""."""
    tokens, logprobs, versions = sample.tokens, sample.logprobs, sample.versions
    if tokens.ndim != 1 or not tokens.shape == logprobs.shape == versions.shape:
        shapes = f"{tokens.shape} tokens, {logprobs.shape} log-probabilities, {versions.shape}"
        return f"arrays of {shapes} versions, expected as many of each"
    if tokens.dtype.kind != "i" or versions.dtype.kind != "i":
        return f"{tokens.dtype} tokens of {versions.dtype} versions, expected integers"
    if not 1 <= len(tokens) <= most:
        return f"a sample of {len(tokens)} tokens, expected 1 to {most}"
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        return f"the tokens {tokens.min()} to {tokens.max()}, expected 0 to {vocabulary - 1}"
    if not (np.isfinite(logprobs).all() and logprobs.max() <= ABOVE_ZERO):
        bounds = f"{logprobs.min()} to {logprobs.max()}"
        return f"the log-probabilities {bounds}, expected finite ones of at most 0"
    if versions.min() < oldest or versions.max() > newest:
        bounds = f"{versions.min()} to {versions.max()}"
        return f"tokens of the policy versions {bounds}, expected {oldest} to {newest}"
    try:
        left = support.decode(sample.support or b"", len(tokens))
    except ValueError as error:
        return f"an unreadable support ({error})"
    if left is not None and not left.has(tokens).all():
        return "a token that its own support lacks"
    return ""
