"""What every inference engine offers: token ids in and out, behaviour log-probabilities, versions, prefix-cache counts."""

from collections.abc import Callable
from typing import Protocol

from wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult

OnTokens = Callable[[int, list[int], list[float]], None]
"""Called in the event loop with a sample's index, and its new token ids and their log-probabilities, in order."""
OnTop = Callable[[int, list[int], list[float], list[dict[int, float]]], None]
"""As ``OnTokens``, then ``Sample.top`` of the new tokens; empty where the request asks for none."""


class Engine(Protocol):
    """An engine serves one policy; cancelling ``generate`` aborts its samples and frees their memory.

    Log-probabilities are of the distribution really sampled from (after temperature, top-p/k and constraint); at temperature 0
    they are of the untempered distribution. ``stats`` are counters: prompt_tokens, cached_tokens (served from the prefix cache),
    prefilled_tokens, decoded_tokens, busy_s; and gauges: version, kv_capacity_tokens (how many tokens the prefix cache holds).
    """

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Raises DataFault when the request can never fit. ``on_tokens`` sees the tokens as they come, before the result."""
        ...

    async def load(self, request: LoadRequest) -> LoadResult:
        """Swap weights between two tokens. Raises InfrastructureFault when the digest disagrees; the old weights stay."""
        ...

    def stats(self) -> dict[str, float]: ...

    async def died(self) -> str:
        """Returns, with the reason, when the engine can serve no more and was not closed; open requests have failed by then."""
        ...

    async def close(self) -> None: ...
