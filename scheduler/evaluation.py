"""Held-out evaluation by whole trajectories, with 95% intervals, beside trivial baselines that need no model."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from actors.environments.base import Environment, Task
from scheduler.tree import Tree


class Estimate(msgspec.Struct, frozen=True):
    """A mean with the half width of its 95% interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.half:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 1.96 standard errors; for values in {0, 1} the standard error is that of a proportion, never below one in n."""
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    if set(values) <= {0.0, 1.0}:
        smoothed = (math.fsum(values) + 2) / (n + 4)  # Agresti-Coull: an observed 0 or 1 is no certainty
        variance = max(variance, smoothed * (1 - smoothed))
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


class HeldOut(msgspec.Struct, frozen=True):
    """What an evaluation found: the environment's measures, of which ``headline`` is the one to look at first."""

    version: int
    questions: int
    headline: str
    measures: dict[str, Estimate]


def summarise(version: int, environment: Environment, trees: Sequence[tuple[Task, Tree]]) -> HeldOut:
    """The evaluation of finished trees with one trajectory each."""
    values: dict[str, list[float]] = {}
    for task, tree in trees:
        turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
        for name, found in environment.measures(task, turns).items():
            values.setdefault(name, []).extend(found)
    measures = {name: estimate(found) for name, found in sorted(values.items())}
    return HeldOut(version, len(trees), environment.headline, measures)


def trivial_baselines(heldout: Sequence[Task], train: Sequence[Task]) -> dict[str, float]:
    """Exact match without a model: a random training answer, and the one constant answer that is best on the held-out set itself."""
    rng = random.Random(0)
    answers = [task.golds[0] for task in train]
    random_hits = [float(rng.choice(answers).lower() in {g.lower() for g in task.golds}) for task in heldout]
    best = Counter(gold.lower() for task in heldout for gold in set(task.golds)).most_common(1)
    return {
        "random_answer": sum(random_hits) / len(random_hits),
        "best_constant_answer": best[0][1] / len(heldout) if best else 0.0,
    }
