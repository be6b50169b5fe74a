"""The interface of every inference engine, the engines by name, and the checks of requests that no
engine can serve. A user's own engine is named "module:Class" (docs/extend.md)."""

import inspect
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coppice.actors.config import ActorProcess
from coppice.common.options import check_choice, checked, imported
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult


class Engine(Protocol):
    """One policy, from token ids to token ids: ``start``, then any number of ``generate`` and
    ``load`` at once, then ``close``. Cancelling ``generate`` aborts its samples. Log-probabilities
    are of the distribution really sampled from (after temperature, top-p/k and constraint), at
    temperature 0 of the untempered one. ``stats``: counters prompt_tokens, cached_tokens,
    prefilled_tokens, decoded_tokens, busy_s; gauges version and kv_capacity_tokens (of the prefix
    cache)."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises DataFault when the request can never fit."""
        ...

    async def load(self, request: LoadRequest) -> LoadResult:
        """Swap weights between two tokens. Raises InfrastructureFault if the digest disagrees."""
        ...

    def stats(self) -> dict[str, float]: ...

    async def died(self) -> str:
        """Return the reason when the engine can no longer serve. Its requests have failed then."""
        ...

    async def close(self) -> None: ...


MOST_TOP = 20
"""The largest ``Sampling.top_logprobs``, as in the OpenAI protocol."""


def check_request(request: GenerateRequest, most: int, longest: int) -> None:
    """Raise DataFault for a request that never fits. most: samples. longest: tokens in all."""
    sampling, prompt, new = request.sampling, len(request.tokens), request.sampling.max_tokens
    if not 1 <= request.n <= most:
        raise DataFault(f"n={request.n}: expected 1 to actors.max_batch={most}")
    if prompt < 1 or new < 1 or prompt + new > longest:
        raise DataFault(
            f"a prompt of {prompt} tokens and {new} new ones: expected at least one of each and at"
            f" most {longest} together (actors.max_context, or the model's own limit)"
        )
    heat, top_p = sampling.temperature, sampling.top_p
    if not (heat == 0 or heat >= 1e-3) or not 0 < top_p <= 1:
        raise DataFault(
            f"temperature {heat} and top_p {top_p}: expected 0 (greedy) or at least 0.001,"
            " and a top_p in (0, 1]"
        )
    if not 0 <= sampling.top_logprobs <= MOST_TOP:
        raise DataFault(f"top_logprobs {sampling.top_logprobs}: expected 0 to {MOST_TOP}")


def check_tokens(ids: np.ndarray, vocabulary: int, folder: Path) -> None:
    """Raise DataFault for an empty list, and for ids outside the model's embedding, which would
    fail every request of the step. vocabulary: its rows, 0 when unknown."""
    if not len(ids):
        raise DataFault("0 tokens: expected at least one")
    if ids.min() < 0 or (vocabulary and ids.max() >= vocabulary):
        raise DataFault(
            f"token ids from {ids.min()} to {ids.max()}: expected 0 to {vocabulary - 1}, the ids of"
            f" {folder}; the request was made with another model's tokenizer"
        )


BUILT_IN = {
    "local": "coppice.actors.engines.local:LocalEngine",
    "sglang": "coppice.actors.engines.sglang:SGLangEngine",
    "vllm": "coppice.actors.engines.vllm:VLLMEngine",
}
_OWN = ("model", "config", "seed", "place", "deterministic", "turns")
"""Parameters of an engine's constructor that no option sets."""


def check(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an unknown name and for options that the engine does not take."""
    if ":" in name:
        _imported(name, options)
        return
    entry = f"actors.engine = {name!r}"
    check_choice(entry, name, BUILT_IN, ", or module:Class")
    if options:
        raise ValueError(
            f"actors.engine_options {sorted(options)} have no effect with {entry}: remove them"
        )


def load(process: ActorProcess) -> Engine:
    """Return the engine of an actor process, not yet started. Raises ValueError for its options."""
    kind, options = _imported(process.actors.engine, process.actors.engine_options)
    own = {key: getattr(process, "actors" if key == "config" else key) for key in _OWN}
    takes = inspect.signature(kind).parameters
    return kind(**{key: value for key, value in own.items() if key in takes}, **options)


def _imported(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return an engine's class, and its options as the types that the constructor declares."""
    kind = imported(f"actors.engine = {name!r}", BUILT_IN.get(name, name))
    return kind, checked("actors.engine_options", name, kind.__init__, options, ("self", *_OWN))
