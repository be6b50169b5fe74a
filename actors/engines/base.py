"""The interface of every inference engine: token ids in and out, behaviour log-probabilities,
versions and counts of the prefix cache."""

from collections.abc import Callable
from typing import Protocol

from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult

OnTokens = Callable[[int, list[int], list[float]], None]
"""Called in the event loop with a sample's index, its new token ids and their log-probabilities, in
order."""
OnTop = Callable[[int, list[int], list[float], list[dict[int, float]]], None]
"""Like ``OnTokens``, with ``Sample.top`` of the new tokens as a fourth argument (empty if the
request does not ask for it)."""


class Engine(Protocol):
    """An engine serves one policy: ``start``, then any number of ``generate`` and ``load`` at once,
    then ``close``.

    Cancelling ``generate`` aborts its samples and frees their memory. Log-probabilities refer to
    the distribution that was really sampled from (after temperature, top-p/k and constraint), at
    temperature 0 to the untempered distribution. A request with ``Sampling.support`` gets the
    tokens that top-p and top-k left, over which the learner takes its own log-probabilities.

    ``stats`` returns the counters prompt_tokens, cached_tokens (served from the prefix cache),
    prefilled_tokens, decoded_tokens and busy_s, and the gauges version and kv_capacity_tokens
    (tokens that the prefix cache can hold)."""

    async def start(self) -> None: ...

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None
    ) -> GenerateResult:
        """Raises DataFault when the request can never fit. ``on_tokens`` gets the tokens as they
        are sampled, before the result."""
        ...

    async def load(self, request: LoadRequest) -> LoadResult:
        """Swap the weights between two tokens. If the digest disagrees, the old weights stay and
        InfrastructureFault is raised."""
        ...

    def stats(self) -> dict[str, float]: ...

    async def died(self) -> str:
        """Return the reason when the engine can no longer serve although it was not closed. Its
        open requests have failed by then."""
        ...

    async def close(self) -> None: ...
