"""The results of held-out evaluations by whole trajectories, with 95% intervals, and trivial
baselines that need no model."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.scheduler.growth.tree import Tree


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
    """The mean and 1.96 standard errors. For values in {0, 1} the standard error is that of a
    proportion, and never 0."""
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    if set(values) <= {0.0, 1.0}:
        # Agresti-Coull: an observed share of 0 or 1 is not certain
        smoothed = (math.fsum(values) + 2) / (n + 4)
        variance = max(variance, smoothed * (1 - smoothed))
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


class HeldOut(msgspec.Struct, frozen=True):
    """The result of one evaluation: the environment's measures. ``headline`` names the most
    important measure."""

    version: int
    questions: int
    headline: str
    measures: dict[str, Estimate]


def measured(environment: Environment, task: Task, tree: Tree) -> dict[str, list[float]]:
    """Return the environment's measures of a finished tree that has one trajectory."""
    turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
    return environment.measures(task, turns)


def summarise(
    version: int, environment: Environment, trees: Sequence[tuple[Task, Tree]]
) -> HeldOut:
    """Evaluate finished trees that have one trajectory each. A measure without any value, such as
    "oracle" without a judge, is left out."""
    values: dict[str, list[float]] = {}
    for task, tree in trees:
        for name, several in measured(environment, task, tree).items():
            values.setdefault(name, []).extend(several)
    measures = {name: estimate(several) for name, several in sorted(values.items()) if several}
    return HeldOut(version, len(trees), environment.headline, measures)


def trivial_baselines(heldout: Sequence[Task], train: Sequence[Task]) -> dict[str, float]:
    """Exact match without a model: of a random training answer, and of the constant answer that is
    best on the held-out set itself. Empty if a task has no gold answer."""
    if not all(task.golds for task in (*heldout, *train)):
        return {}
    rng = random.Random(0)
    answers = [task.golds[0] for task in train]
    random_hits = [
        float(rng.choice(answers).lower() in {g.lower() for g in task.golds}) for task in heldout
    ]
    best = Counter(gold.lower() for task in heldout for gold in set(task.golds)).most_common(1)
    return {
        "random_answer": sum(random_hits) / len(random_hits),
        "best_constant_answer": best[0][1] / len(heldout) if best else 0.0,
    }
