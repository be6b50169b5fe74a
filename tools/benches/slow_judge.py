"""SLATE's rule judge behind a simulated heavy-tailed latency: log-normal, drawn for each request."""

import asyncio
import random

from judges.slate_rules import SlateRules
from wire.messages import JudgedTurn, Judgement


class SlowRules(SlateRules):
    """median_s exp(sigma z) seconds a batch, z standard normal."""

    name = "slow_rules"
    batch = 8

    def __init__(self, median_s: float = 0.3, sigma: float = 1.3, seed: int = 0):
        super().__init__()
        self.median_s, self.sigma, self.rng = median_s, sigma, random.Random(seed)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        await asyncio.sleep(self.median_s * self.rng.lognormvariate(0.0, self.sigma))
        return await super().score(turns)
