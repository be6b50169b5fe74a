"""The exact-match judge with a simulated heavy-tailed latency, which is log-normal and drawn for each request."""

import asyncio
import random

from judges.exact_match import ExactMatch
from wire.messages import JudgedTurn, Judgement


class SlowExactMatch(ExactMatch):
    """Takes median_s exp(sigma z) seconds per request, with z standard normal. Every tree asks this judge once, before the tree closes."""

    batch = 1

    def __init__(self, median_s: float = 1.0, sigma: float = 1.3, seed: int = 0):
        self.median_s, self.sigma, self.rng = median_s, sigma, random.Random(seed)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        await asyncio.sleep(self.median_s * self.rng.lognormvariate(0.0, self.sigma))
        return await super().score(turns)
