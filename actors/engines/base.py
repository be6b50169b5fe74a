"""What every inference engine offers: token ids in and out, behaviour log-probabilities, versions, prefix-cache counts."""

from typing import Protocol

from wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult, ScoreRequest, ScoreResult


class Engine(Protocol):
    """An engine serves one policy; cancelling ``generate`` aborts its samples and frees their memory.

    Log-probabilities are of the distribution really sampled from (after temperature and top-p/k); at temperature 0 they
    are of the untempered distribution. ``stats`` are counters: prompt_tokens, cached_tokens (served from the prefix cache),
    prefilled_tokens, ideal_prefill_tokens (each distinct prefix once a version), decoded_tokens, busy_s; and version.
    """

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises DataFault when the request can never fit."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult: ...

    async def load(self, request: LoadRequest) -> LoadResult:
        """Swap weights between two tokens. Raises InfrastructureFault when the digest disagrees; the old weights stay."""
        ...

    def stats(self) -> dict[str, float]: ...

    async def close(self) -> None: ...
