"""From judge columns to a step's reward, and from advantages to the choice of the next step (methods.md 1.1, 1.3, 1.4)."""

import math
import random
from collections.abc import Sequence

INVALID_REWARD = -2.0
"""An action with neither search nor answer gets the worst composite score (methods.md 1.4)."""


def composite(scores: dict[str, float], answered: bool, step: int, budget: int, bonus: float) -> float:
    """r_t: think + query for a search; think + answer + bonus (B - t) / B for an answer, t from 1. An invalid component is 0."""
    think = scores.get("think", 0.0)
    if not answered:
        return think + scores.get("query", 0.0)
    return think + scores.get("answer", 0.0) + bonus * (budget - step) / budget


def selection(scores: Sequence[float], eta: float) -> list[float]:
    """softmax(A / eta): the probability of each candidate to be continued."""
    top = max(scores)
    weights = [math.exp((score - top) / eta) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def choose(scores: Sequence[float], allowed: Sequence[int], rule: str, eta: float, rng: random.Random) -> int:
    """Index of the candidate to continue among ``allowed``: drawn by ``selection``, or the first best ("best-of-k")."""
    if rule == "best-of-k":
        return max(allowed, key=lambda index: scores[index])
    return rng.choices(allowed, selection([scores[index] for index in allowed], eta))[0]
