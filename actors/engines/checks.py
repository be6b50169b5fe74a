"""Refuse requests that no engine can serve, before an engine tries."""

from pathlib import Path

import numpy as np

from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest

MOST_TOP = 20
"""The largest ``Sampling.top_logprobs``, as in the OpenAI protocol."""


def request(asked: GenerateRequest, most: int, longest: int) -> None:
    """Raises DataFault for a request that can never work. most: samples of a request. longest:
    tokens of prompt and continuation."""
    sampling, prompt = asked.sampling, len(asked.tokens)
    if not 1 <= asked.n <= most:
        raise DataFault(f"n={asked.n}: expected 1 to actors.max_batch={most}")
    if prompt < 1 or sampling.max_tokens < 1 or prompt + sampling.max_tokens > longest:
        raise DataFault(
            f"a prompt of {prompt} tokens and {sampling.max_tokens} new ones: expected at least one of each and at most"
            f" {longest} together (actors.max_context, or the model's own limit)"
        )
    if (
        not (sampling.temperature == 0 or sampling.temperature >= 1e-3)
        or not 0 < sampling.top_p <= 1
    ):
        raise DataFault(
            f"temperature {sampling.temperature} and top_p {sampling.top_p}: expected 0 (greedy) or at least 0.001,"
            " and a top_p in (0, 1]"
        )
    if not 0 <= sampling.top_logprobs <= MOST_TOP:
        raise DataFault(f"top_logprobs {sampling.top_logprobs}: expected 0 to {MOST_TOP}")


def tokens(ids: np.ndarray, vocabulary: int, folder: Path) -> None:
    """Raises DataFault for an empty list, and for ids outside the model's embedding. vocabulary:
    its rows, 0 when unknown.

    Such an id would fail inside the model and fail every request of the step.
    """
    if not len(ids):
        raise DataFault("0 tokens: expected at least one")
    if ids.min() < 0 or (vocabulary and ids.max() >= vocabulary):
        raise DataFault(
            f"token ids from {ids.min()} to {ids.max()}: expected 0 to {vocabulary - 1}, the ids of {folder};"
            " the request was made with another model's tokenizer"
        )
